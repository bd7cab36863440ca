"""Names and files of engines, what an engine does not support, and mistakes in the flags of sampling."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from tests.unit.utils.generation.decoding.test_hf import GREEDY
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.rollout_engine import RolloutRequest, RolloutSettings
from training.utils.flags.flags import note_mistakes
from training.utils.generation.arguments import SamplingArguments
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


def test_what_an_engine_does_not_support(monkeypatch):
    def noted(name, wanted, **more):
        mistakes = Mistakes()
        return checked_engine(name, wanted, mistakes, **more), mistakes.sentences

    assert noted("hf", {"min_p": 0.1, "bad_words": ["x"], "stop": ["x"]}) == (TransformersRollout, [])
    said = f"--rollout_engine expects one of {', '.join(ENGINES)} or FILE.py:NAME, got 'hff'; did you mean 'hf'?"
    assert noted("hff", {"min_p": 0.1}) == (None, [said])

    def missing() -> None:
        raise ThreestepError("a package is missing")

    monkeypatch.setattr(TransformersRollout, "check_installed", missing)
    assert noted("hf", {}) == (TransformersRollout, ["a package is missing"])
    assert noted("hf", {}, draws=False) == (TransformersRollout, [])


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
    assert mistakes.sentences == ["--own_size: only for --rollout_engine hf, not for other; remove these flags"]
    own = Mistakes()
    flags.refuse_others("hf", own)
    flags.refuse_others("own.py:Own", own)
    assert own.sentences == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_new_tokens": 0}, "--max_new_tokens expects 1 or more, got 0"),
        ({"temperature": -1.0}, "--temperature expects 0 or more, got -1.0"),
        ({"top_k": -1}, "--top_k expects 0 or more, got -1"),
        ({"top_p": 0.0}, "--top_p expects more than 0 and at most 1, got 0.0"),
        ({"min_p": 2.0}, "--min_p expects a number from 0 to 1, got 2.0"),
        ({"dtype": "int8"}, "--dtype expects one of fp32, bf16, fp16, got 'int8'"),
    ],
)
def test_mistakes_in_flags_of_sampling(changes, sentence):
    mistakes = Mistakes()
    note_mistakes(SamplingArguments(**changes), mistakes)
    assert mistakes.sentences == [sentence]
