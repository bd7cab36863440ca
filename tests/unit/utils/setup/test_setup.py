"""Step counts, the run's folder, and loading in the right precision."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from training.utils.base.errors import ThreestepError
from training.utils.contracts.token_rows import TokenRows
from training.utils.engine.config.arguments import EngineArguments, EngineSettings
from training.utils.engine.ranks.devices import Backend
from training.utils.engine.ranks.startup import Ranks
from training.utils.models.token_model import PolicyModel
from training.utils.setup import setup
from training.utils.setup.setup import (
    load_under,
    may_pack,
    whole_steps,
)


def ranks(world_size: int = 1, rank: int = 0) -> Ranks:
    return Ranks(rank, rank, world_size, torch.device("cpu"))


@pytest.mark.parametrize(
    ("given", "world_size", "rows", "expected"),
    [
        ({}, 1, 100, (6, 16)),
        ({}, 2, 100, (3, 32)),
        ({"gradient_accumulation_steps": 3}, 2, 100, (1, 96)),
        ({"num_train_epochs": 3.0}, 1, 100, (18, 16)),
        ({"max_train_steps": 4}, 1, 100, (4, 16)),
        ({"max_train_steps": 40}, 1, 100, (6, 16)),
    ],
)
def test_whole_steps(given, world_size, rows, expected):
    assert whole_steps(EngineArguments(**given), rows, ranks(world_size)) == expected


def test_rows_that_fill_no_step():
    with pytest.raises(
        ThreestepError,
        match=r"takes 64 sequences \(--per_device_train_batch_size 16 x 2 ranks x --gradient_accumulation_steps 2\) "
        "and 1 epochs of 63 training rows do not fill one",
    ):
        whole_steps(EngineArguments(gradient_accumulation_steps=2), 63, ranks(2))


class Read:
    """An engine in all that `may_pack` asks of one: a policy, read in eval mode."""

    def __init__(self, family: str) -> None:
        self.model = tiny_causal_lm(family).train()
        self.ranks, self.policy, self.read = ranks(), PolicyModel(self.model), 0

    @property
    def module(self) -> torch.nn.Module:
        return self.model

    def eval(self) -> None:
        self.model.eval()

    def train(self, mode: bool) -> None:
        self.model.train(mode)

    def __call__(self, rows: TokenRows) -> torch.Tensor:
        assert not self.model.training
        self.read += 1
        return self.policy(rows).logprobs_M


def packs(family: str, padded: bool, **more) -> tuple[bool, Read, list[tuple[str, bool]]]:
    engine, said = Read(family), []
    answer = may_pack(
        padded,
        engine.model,
        engine,
        engine,
        longest_tokens=30,
        log=lambda text, is_main: said.append((text, is_main)),
        **more,
    )
    return answer, engine, said


def test_a_model_that_can_packs_without_a_word():
    answer, engine, said = packs("llama", padded=False)
    assert answer is True and said == [] and engine.read > 0 and engine.model.training


def test_a_user_who_wants_padding_gets_it_without_a_word():
    """What padded rows give is compared with the model's own forward all the same."""
    answer, engine, said = packs("llama", padded=True)
    assert answer is False and said == [] and engine.read == 1


def test_a_model_that_cannot_is_padded_with_the_reason():
    answer, _, said = packs("bloom", padded=False)
    assert answer is False
    assert said == [
        (
            "warning: BloomForCausalLM trains on padded rows: its attention implementation 'eager' takes no mask of "
            "segments here",
            True,
        )
    ]


@pytest.mark.parametrize("padded", [False, True])
def test_segments_within_a_document_are_checked_padded_or_not(padded):
    needs = {"sharing": False, "needs_segments": "--parallel_thinking"}
    answer, engine, said = packs("llama", padded, **needs)
    assert answer is not padded and said == [] and engine.read > 0
    start = "^--parallel_thinking needs a model that takes a mask of segments, padded or not, and "
    sentence = (
        start + "BloomForCausalLM does not: its attention implementation 'eager' takes no mask of segments here; use "
        "another model or --attn_implementation, or leave --parallel_thinking out$"
    )
    with pytest.raises(ThreestepError, match=sentence):
        packs("bloom", padded, **needs)


def test_loading_gives_the_dtype():
    asked = []
    model = load_under(
        EngineSettings(dtype="bf16"), ranks(), lambda dtype: asked.append(dtype) or tiny_causal_lm("gpt2", dtype)
    )
    assert asked == [torch.bfloat16] and model.dtype is torch.bfloat16


def test_the_peak_is_measured_as_the_run_multiplies(monkeypatch):
    held = []

    @contextlib.contextmanager
    def inside():
        held.append(True)
        yield
        held.pop()

    monkeypatch.setattr(setup, "peak_of_all_ranks", lambda dtype, device: 5.0 * len(held))
    meter = setup.compute_meter(tiny_causal_lm("gpt2"), replace(ranks(), backend=Backend(inside)))
    assert meter.peak_flops_per_second == 5.0 and not held
