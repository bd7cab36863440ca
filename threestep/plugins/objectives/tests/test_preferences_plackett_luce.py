"""DPO on rankings: by hand, against the paper in float64, and of two responses."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from tests.support.objectives import objective
from training.step2_dpo.loss import Responses, preference_loss


def ranked(prompts: list[list[float]], dtype: torch.dtype = torch.float64) -> tuple[Responses, torch.Tensor]:
    """Log-ratios of each prompt's responses, best first; all pairs of a prompt share a weight of 1."""
    ratios_B = torch.tensor([ratio for prompt in prompts for ratio in prompt], dtype=dtype, requires_grad=True)
    better, worse, weights, is_best, first = [], [], [], [], 0
    for prompt in prompts:
        pairs = list(combinations(range(first, first + len(prompt)), 2))
        better += [pair[0] for pair in pairs]
        worse += [pair[1] for pair in pairs]
        weights += [1.0 / len(pairs)] * len(pairs)
        is_best += [True, *[False] * (len(prompt) - 1)]
        first += len(prompt)
    sides = torch.tensor(better), torch.tensor(worse), torch.tensor(weights, dtype=dtype)
    return Responses(ratios_B, ratios_B, ratios_B, *sides, torch.tensor(is_best)), ratios_B


def plainly(prompts: list[list[float]], beta: float) -> float:
    """-log of the product over k of exp(beta r_k) / sum over j >= k of exp(beta r_j)."""
    total = 0.0
    for ratios in prompts:
        scores = [math.exp(beta * ratio) for ratio in ratios]
        total -= math.log(math.prod(scores[k] / sum(scores[k:]) for k in range(len(scores))))
    return total / len(prompts)


def test_three_responses_by_hand():
    """beta 0.5, log-ratios 1, 0, -1: ln(1 + e^-0.5 + e^-1) + ln(1 + e^-0.5) = ln 1.974410 + ln 1.606531.

    Slopes, with p the shares of the first sum (0.506480, 0.307196, 0.186324) and q of the second (0.622459, 0.377541):
    0.5 (p_1 - 1), 0.5 (p_2 + q_2 - 1), 0.5 (p_3 + q_3).
    """
    responses, ratios_B = ranked([[1.0, 0.0, -1.0]])
    loss = preference_loss(responses, 1.0, objective("plackett_luce", 0.5))
    loss.backward()
    assert loss.item() == pytest.approx(0.680269 + 0.474077, abs=1e-6)
    assert ratios_B.grad.tolist() == pytest.approx([-0.246760, -0.035173, 0.281932], abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_against_the_paper(seed: int):
    dice = torch.Generator().manual_seed(seed)
    prompts = [(3 * torch.randn(count, generator=dice, dtype=torch.float64)).tolist() for count in (4, 2, 3, 5)]
    how = objective("plackett_luce", 0.7)
    assert preference_loss(ranked(prompts)[0], 4.0, how).item() == pytest.approx(plainly(prompts, 0.7), rel=1e-12)
    parts = [preference_loss(ranked(part)[0], 4.0, how).item() for part in (prompts[:1], prompts[1:])]
    assert sum(parts) == pytest.approx(plainly(prompts, 0.7), rel=1e-12)


def test_of_two_responses_it_is_dpo_with_its_gradients():
    prompts = [[0.4, -0.6], [-3.0, 2.0], [0.0, 0.0]]
    found = []
    for name in ("plackett_luce", "sigmoid"):
        responses, ratios_B = ranked(prompts)
        loss = preference_loss(responses, 3.0, objective(name, 0.3))
        found.append([loss.item(), *torch.autograd.grad(loss, ratios_B)[0].tolist()])
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_far_log_ratios_stay_finite():
    responses, ratios_B = ranked([[-900.0, 900.0, 0.0], [900.0, 0.0, -900.0]], torch.float32)
    loss = preference_loss(responses, 2.0, objective("plackett_luce", 1.0))
    loss.backward()
    assert loss.item() == pytest.approx((1800.0 + 0.0) / 2) and bool(ratios_B.grad.isfinite().all())
