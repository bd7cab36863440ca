"""A run whose function ends it, adds figures, or fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.utils.checkpoints.test_loop import last_step, opened, plan
from threestep.plugins.callback.called import open_course
from training.utils.base.errors import ThreestepError


def ended(
    place: Path, losses: dict[int, float], callback: str | None = None, resume: str | None = None, **flags: Any
) -> int:
    course = open_course({"callback": callback})
    return last_step(opened(plan(place, resume=resume, **flags), place, course=[course] if course else []), losses)


LOSSES = {1: 3.0, 2: 1.0, 4: 2.0, 6: 1.0}


def own_callback(folder: Path, body: str) -> str:
    folder.mkdir(parents=True)
    (folder / "own.py").write_text(f"def seen(step, figures):\n    {body}\n")
    return f"{folder}/own.py:seen"


def test_a_callback_ends_the_run_and_adds_figures(tmp_path, capsys):
    own = own_callback(
        tmp_path / "own", "return 'stop' if figures.get('eval/loss') == 2.0 else {'own/twice': 2 * step}"
    )
    assert ended(tmp_path / "a", LOSSES, own, save_at_end=True) == 4
    assert 'training ends after step 4: the callback returned "stop"' in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [line.get("own/twice") for line in lines] == [2, 2, 4, 4, 6, 8, None]
    assert ended(tmp_path / "a", LOSSES, own, resume="latest") == 4  # it is over
    assert ended(tmp_path / "a", LOSSES, resume="latest") == 10  # without it, prolonged


def test_a_callbacks_mistake_ends_the_run(tmp_path):
    own = own_callback(tmp_path / "own", "return 1 / (3 - step)")
    with pytest.raises(
        ThreestepError, match="^--callback: the function expects to return None, .*, got 0.5; leave out"
    ):
        ended(tmp_path / "a", LOSSES, own)
    own = own_callback(tmp_path / "other", "return None if step < 3 else 1 / 0")
    with pytest.raises(ThreestepError, match=r"^--callback: seen raised ZeroDivisionError: .* \(own.py, line 2\)$"):
        ended(tmp_path / "b", LOSSES, own)


def test_checkpoints_of_earlier_versions_say_that_it_ended_the_run():
    for state in ({"called": True}, {"early_end": {"called": True}}):
        course = open_course({"callback": f"{__file__}:last_step"})
        assert course is not None
        course.resumed(state)
        assert course.end_reason() == 'the callback returned "stop"'
