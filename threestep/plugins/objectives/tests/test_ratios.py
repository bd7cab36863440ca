"""Losses of single tokens and whole responses: by hand, by their formulas, and however a step is split."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.step_losses import LONGEST, check_any_split, clipped, held, mean, random_step
from threestep.plugins.objectives.policy_losses import SapoArguments
from training.step3_ppo.losses import AGGREGATIONS, POLICY_LOSSES
from training.step3_ppo.losses.losses import PolicyLossSettings, PolicyTokens

SAPO = SapoArguments(sapo_tau_pos=1.5, sapo_tau_neg=2.5)


def _geo_mean(d, a, logp, row, picked):
    held = [min(d, 0.3) if a > 0 else max(d, -0.15) for d, a in row]
    return -mean([a for _, a in row]) * math.exp(mean(held))


def _sapo(d, a, logp, row, picked):
    tau = 1.5 if a > 0 else 2.5
    return -a * 4 / tau / (1 + math.exp(-tau * (math.exp(d) - 1)))


FORMULAS = {
    "gspo": lambda d, a, logp, row, picked: clipped(math.exp(mean([d for d, _ in row])), a),
    "cispo": lambda d, a, logp, row, picked: -held(math.exp(d)) * a * logp,
    "geo_mean": _geo_mean,
    "sapo": _sapo,
    "gpg": lambda d, a, logp, row, picked: -a * logp,
}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", FORMULAS)
@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, LONGEST), min_size=1, max_size=7), st.integers(0, 99), st.integers(1, 4))
def test_the_written_formula_and_any_split(loss, aggregation, lengths, seed, count):
    check_any_split(loss, FORMULAS[loss], aggregation, random_step(lengths, seed), seed, count, options=SAPO)


def test_geo_mean_by_hand():
    # A 2, log ratios 0.6, -0.3, 0.3, the first held at 0.4: mean 0.4 / 3, loss -2 e^(0.4 / 3) for each token. Its mean
    # has the gradient -2 e^(0.4 / 3) / 3 for those that are not held. A -1, log ratios -0.7 and 0.5, the first held at
    # -0.4: mean 0.05, loss e^0.05.
    old_M = torch.tensor([-1.0, -2.0, -3.0, -1.0, -1.0], dtype=torch.float64)
    moved_M = torch.tensor([0.6, -0.3, 0.3, -0.7, 0.5], dtype=torch.float64)
    logprobs_M, sequence_M = (old_M + moved_M).requires_grad_(), torch.tensor([0, 0, 0, 1, 1])
    advantages_M = torch.tensor([2.0, 2.0, 2.0, -1.0, -1.0], dtype=torch.float64)
    tokens = PolicyTokens(logprobs_M, old_M, advantages_M, sequence_M)
    entry = POLICY_LOSSES["geo_mean"]
    loss_M, clipped_M = entry.loss(tokens, PolicyLossSettings(entry.clip_low, entry.clip_high))
    one, two = -2 * math.exp(0.4 / 3), math.exp(0.05)
    assert loss_M.tolist() == pytest.approx([one, one, one, two, two])
    assert clipped_M.tolist() == [True, False, False, True, False]
    (loss_M[:3].mean() + loss_M[3:].mean()).backward()
    assert logprobs_M.grad.tolist() == pytest.approx([0, one / 3, one / 3, 0, two / 2])


def test_sapo_by_hand():
    # Ratio 1: sigmoid(0) 4 / tau = 2 / tau, gradient -A whatever tau is. Ratio 3, A 1, tau 1: 4 sigmoid(2) = 3.523, and
    # for log p 4 sigmoid(2) (1 - sigmoid(2)) 3 = 1.260; PPO would have 3, or 0 where it clips.
    old_M = torch.tensor([-2.0, -2.0, -2.0], dtype=torch.float64)
    logprobs_M = (old_M + torch.tensor([1.0, 1.0, 3.0], dtype=torch.float64).log()).requires_grad_()
    tokens = PolicyTokens(logprobs_M, old_M, torch.tensor([5.0, -2.0, 1.0]).double(), torch.tensor([0, 1, 2]))
    loss_M, clipped_M = POLICY_LOSSES["sapo"].loss(tokens, PolicyLossSettings(0.2, 0.2, options=SapoArguments()))
    assert loss_M.tolist() == pytest.approx([-10.0, 4 / 1.05, -3.5232], abs=1e-4) and not clipped_M.any()
    loss_M.sum().backward()
    assert logprobs_M.grad.tolist() == pytest.approx([-5.0, 2.0, -1.2599], abs=1e-4)


def test_gspo_by_hand():
    # Log ratios (0.3, 0.1) and (-0.4): means 0.2 and -0.4, ratios 1.2214 and 0.6703; bounds 0.9 and 1.1.
    # A 1: -min(1.2214, 1.1) = -1.1, clipped, no gradient.  A 2: -min(1.3406, 1.8) = -1.3406, gradient -1.3406.
    old_M = torch.tensor([-1.0, -2.0, -3.0])
    logprobs_M = (old_M + torch.tensor([0.3, 0.1, -0.4])).requires_grad_()
    tokens = PolicyTokens(logprobs_M, old_M, torch.tensor([1.0, 1.0, 2.0]), torch.tensor([0, 0, 1]))
    loss_M, clipped_M = POLICY_LOSSES["gspo"].loss(tokens, PolicyLossSettings(clip_low=0.1, clip_high=0.1))
    torch.testing.assert_close(loss_M, torch.tensor([-1.1, -1.1, -2 * math.exp(-0.4)]))
    assert clipped_M.tolist() == [True, True, False]
    loss_M.sum().backward()
    torch.testing.assert_close(logprobs_M.grad, torch.tensor([0.0, 0.0, -2 * math.exp(-0.4)]))


def test_gspos_gradient_is_that_of_the_sequences_ratio():
    """d/dlogp_t of s A is s A / length for every token: what the mean over a sequence makes of the token form."""
    old_M, moved = torch.tensor([-1.0, -2.0, -0.5, -0.7]), torch.tensor([0.02, -0.01, 0.05, 0.03])
    logprobs_M = (old_M + moved).requires_grad_()
    direct = -3.0 * torch.exp((logprobs_M - old_M).mean())
    (want_M,) = torch.autograd.grad(direct, logprobs_M)
    tokens = PolicyTokens(logprobs_M, old_M, torch.full((4,), 3.0), torch.zeros(4, dtype=torch.int64))
    loss_M, _ = POLICY_LOSSES["gspo"].loss(tokens, PolicyLossSettings(clip_low=0.2, clip_high=0.2))
    (got_M,) = torch.autograd.grad(loss_M.mean(), logprobs_M)
    torch.testing.assert_close(got_M, want_M)


def test_cispo_by_hand():
    # Ratios 3 and 0.5, bounds 0 and 2: weights 2 and 0.5; gradient -weight A, also where it is clipped.
    old_M = torch.tensor([-2.0, -1.0])
    logprobs_M = (old_M + torch.tensor([3.0, 0.5]).log()).requires_grad_()
    tokens = PolicyTokens(logprobs_M, old_M, torch.tensor([1.0, -4.0]), torch.tensor([0, 1]))
    loss_M, clipped_M = POLICY_LOSSES["cispo"].loss(tokens, PolicyLossSettings(clip_low=1.0, clip_high=1.0))
    loss_M.sum().backward()
    assert logprobs_M.grad.tolist() == pytest.approx([-2.0, 2.0]) and clipped_M.tolist() == [True, False]
