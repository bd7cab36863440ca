"""Names and files of engines, and what an engine does not support."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from tests.unit.utils.generation.decoding.test_hf import GREEDY
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.rollout_engine import RolloutRequest, RolloutSettings
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.generation.table import (
    ENGINES,
    ENGINES_HELP,
    RolloutEngineFlags,
    checked_engine,
    engine_class,
)

OWN = """
from training.utils.generation.decoding.hf import TransformersRollout

class Own(TransformersRollout):
    supports_stop = False

number = 3
"""


def test_a_name_stands_for_an_engine():
    assert engine_class("hf") is TransformersRollout


@pytest.mark.parametrize("name", ENGINES)
def test_the_table_says_what_a_class_says(name):
    engine, flags = engine_class(name), getattr(RolloutEngineFlags(), name, None)
    assert engine.logprobs_are_trained_models == (not ENGINES[name].other_logprobs)
    assert (None if flags is None else type(flags)) is engine.arguments
    assert RolloutEngineFlags().of(engine.arguments) == flags and name in ENGINES_HELP


def test_an_engine_of_the_users(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    found = engine_class(f"{tmp_path}/own.py:Own")
    engine = found.create(None, RolloutSettings(64))
    assert issubclass(found, TransformersRollout) and isinstance(engine, found) and engine.longest_tokens is None
    with pytest.raises(ThreestepError, match="--rollout_engine expects '.*own.py:number' to be a subclass of Rollout"):
        engine_class(f"{tmp_path}/own.py:number")


@pytest.mark.parametrize(
    ("name", "wanted", "sentences"),
    [
        ("hf", {"min_p": 0.1, "bad_words": ["x"], "stop": ["x"]}, []),
        (
            "hff",
            {"min_p": 0.1},
            [f"--rollout_engine expects one of {', '.join(ENGINES)} or FILE.py:NAME, got 'hff'; did you mean 'hf'?"],
        ),
    ],
)
def test_what_an_engine_does_not_support(name, wanted, sentences):
    mistakes = Mistakes()
    found = checked_engine(name, wanted, mistakes)
    assert mistakes.sentences == sentences and (found is None) == (name not in ENGINES)


def test_a_missing_package_is_noted(monkeypatch):
    def missing() -> None:
        raise ThreestepError("a package is missing")

    monkeypatch.setattr(TransformersRollout, "check_installed", missing)
    mistakes, plan = Mistakes(), Mistakes()
    assert checked_engine("hf", {}, mistakes) is TransformersRollout
    assert mistakes.sentences == ["a package is missing"]
    assert checked_engine("hf", {}, plan, draws=False) is TransformersRollout and not plan.sentences


def test_an_engine_without_a_stream_of_its_own_streams_a_rollout():
    class Whole(TransformersRollout):
        stream = TransformersRollout.__base__.stream

    model, prompt_ids_P = tiny_causal_lm("llama").eval(), torch.tensor([5, 6, 7])
    request = RolloutRequest.of_prompt(prompt_ids_P, GREEDY, 1)
    expected = list(TransformersRollout().stream(model, request, ()))
    assert list(Whole().stream(model, request, ())) == expected and len(expected) > 1
    end = expected[1]
    assert list(Whole().stream(model, request, {end})) == expected[: expected.index(end) + 1]


def test_flags_of_another_engine_are_refused():
    @dataclass
    class OwnArguments:
        own_size: int = 4

    @dataclass
    class Flags(RolloutEngineFlags):
        hf: OwnArguments = field(default_factory=OwnArguments)

    flags, mistakes = Flags(), Mistakes()
    flags.refuse_others("other", mistakes)
    assert mistakes.sentences == []
    flags.hf.own_size = 5
    flags.refuse_others("other", mistakes)
    assert mistakes.sentences == ["--own_size: of --rollout_engine hf, and it is other; leave out what has no effect"]
    own = Mistakes()
    flags.refuse_others("hf", own)
    flags.refuse_others("own.py:Own", own)
    assert own.sentences == []
