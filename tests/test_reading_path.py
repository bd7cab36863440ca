"""The listed path through a step of PPO is whole, and does not grow."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import training
from tests.support.reading_path import ASIDE, counted, listed
from tests.support.sources import modules
from tests.unit.step3_ppo.test_trainer import Engine, made_trainer

PACKAGE = Path(training.__file__).parent
MOST_LINES = 1455


def functions_of_a_step() -> set[str]:
    """Functions of step 3 that a rollout with its updates runs, of GAE with a critic, by module and name."""
    trainer, called = made_trainer(Engine(), advantage="gae"), set[str]()

    def note(frame: Any, event: str, _: Any) -> None:
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE / "step3_ppo") and not code.co_name.startswith("<"):
            module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            called.add(f"{module}: {code.co_qualname.partition('.<locals>')[0]}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        experiences = [trainer.experience_of(samples, 1) for samples in trainer.samples(1)]
        trainer.learn(experiences, 1)
    finally:
        sys.setprofile(before)
    return called


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified name")
def test_every_function_of_a_plain_step_is_on_the_path_or_aside():
    known = {f"{module}: {name}" for module, names in listed().items() for name in names}
    for path in ASIDE.values():
        known |= {f"{module}: {name}" for module, names in listed(path).items() for name in names}
    assert not functions_of_a_step() - known


def test_the_path_is_as_long_as_the_lab_book_says():
    lines = sum(count for names in counted(modules(PACKAGE)).values() for count in names.values())
    assert lines <= MOST_LINES, f"{lines} lines: a step of PPO takes more reading; the list only shrinks"
