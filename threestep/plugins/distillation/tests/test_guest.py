"""The denominator is the optimizer step's, over micro-batches and ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from threestep.plugins.distillation.guest import LiveDistillation
from threestep.plugins.distillation.head_loss import HeadComparison
from training.utils.contracts.documents import TokenSequence, plain


def read_of(total: float, covered: float, tokens: int) -> SimpleNamespace:
    return SimpleNamespace(
        compared=HeadComparison(torch.tensor(total, requires_grad=True), torch.tensor(covered)),
        logprobs_M=torch.zeros(tokens),
    )


def test_parts_add_up_to_the_mean_of_the_step():
    guest = LiveDistillation(0.5, covers_all=False, compare=lambda rows, temperature: None)
    documents = [
        plain(TokenSequence(torch.arange(4), torch.tensor([False, True, True, True]))),
        plain(TokenSequence(torch.arange(3), torch.tensor([False, False, True]))),
    ]
    counted = guest.tally(documents)
    assert counted == 4
    step = guest.begin([], None, counted)
    parts = [step.loss_part(None, read_of(3.0, 2.5, 3)), step.loss_part(None, read_of(1.0, 0.5, 1))]
    assert sum(parts).item() == pytest.approx(0.5 * 4.0 / 4) and parts[0].requires_grad
    assert step.loss_part(None, None) == 0.0  # of texts beside the rollout
    totals = {name: float(value) for name, value in step.sums.items()}
    assert step.end("actor", totals) == {"actor/teacher_divergence": 1.0, "actor/teacher_mass": 0.75}
    assert guest.evaluated("eval", {**totals, "teacher_tokens": 0.0}) == {}
    assert set(guest.forward_kwargs(None)) == {"compare"} and "teacher" in guest.why_not_ahead


def test_nothing_that_was_read_has_no_figures():
    step = LiveDistillation(1.0, covers_all=True, compare=lambda rows, temperature: None).begin([], None, 3)
    assert step.end("actor", {}) == {}
