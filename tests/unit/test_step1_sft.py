"""Step 1: its flags, and its losses, sums over tokens divided by the step's count."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.step1_sft import main, trainer
from training.step1_sft.arguments import SftArguments
from training.step1_sft.loss import sft_loss
from training.utils.base.errors import Mistakes
from training.utils.flags.added import NO_FLAGS
from training.utils.flags.flags import note_mistakes


def test_learning_rate():
    mistakes = Mistakes()
    note_mistakes(SftArguments(), mistakes)
    assert mistakes.sentences == []
    note_mistakes(SftArguments(learning_rate=0.0), mistakes)
    assert mistakes.sentences == ["--learning_rate expects more than 0, got 0.0"]


def test_what_is_opened_is_passed_on(monkeypatch):
    monkeypatch.setattr(trainer, "SftTrainer", lambda *given: SimpleNamespace(train=lambda: given))
    opened, flags = "run", SimpleNamespace(added=NO_FLAGS)
    passed_on: Any = main.train
    run, regularizer = passed_on(opened, flags)
    assert run == opened and not regularizer.losses


def test_by_hand():
    # Probabilities 1/2 and 1/4 of a step with 4 target tokens: (ln 2 + 2 ln 2) / 4.
    logprobs_M = torch.log(torch.tensor([0.5, 0.25])).requires_grad_()
    loss = sft_loss(logprobs_M, tokens_in_step=4)
    assert loss.item() == pytest.approx(3 * math.log(2) / 4)
    loss.backward()
    assert logprobs_M.grad.tolist() == [-0.25, -0.25]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-20, 0), min_size=1, max_size=30), st.lists(st.integers(0, 30), max_size=4))
def test_parts_add_up_to_the_mean(values, cuts):
    logprobs_M = torch.tensor(values, dtype=torch.float64)
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [logprobs_M[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    total = sum(sft_loss(part, len(values)) for part in parts)
    assert total.item() == pytest.approx(-sum(values) / len(values), rel=1e-12)


def test_no_tokens_give_zero_on_the_graph():
    logprobs_M = torch.zeros(3, requires_grad=True)
    loss = sft_loss(logprobs_M[:0], 5)
    loss.backward()
    assert loss.item() == 0 and logprobs_M.grad.tolist() == [0, 0, 0]
