"""Every policy loss under every aggregation: its written formula, and the same number and gradient however the step's
sequences are ordered and dealt over micro-batches and ranks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.step_losses import LONGEST, check_any_split, clipped, held, mean, ppo, random_step
from training.step3_ppo.losses import AGGREGATIONS, POLICY_LOSSES
from training.step3_ppo.losses.losses import PolicyLossSettings, PolicyTokens, StepTotals, entropy_loss

FORMULAS = {
    "ppo": ppo,
    "gspo": lambda d, a, logp, row, picked: clipped(math.exp(mean([d for d, _ in row])), a),
    "cispo": lambda d, a, logp, row, picked: -held(math.exp(d)) * a * logp,
}


def how_of(name: str) -> PolicyLossSettings:
    own = POLICY_LOSSES[name].flags
    return PolicyLossSettings(0.15, 0.3, dual_clip=2.0, options=own and own())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", FORMULAS)
@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, LONGEST), min_size=1, max_size=7), st.integers(0, 99), st.integers(1, 4))
def test_the_written_formula_and_any_split(loss, aggregation, lengths, seed, count):
    check_any_split(loss, FORMULAS[loss], aggregation, random_step(lengths, seed), seed, count)


def test_aggregation_by_hand():
    # Two responses of 1 and 3 tokens that count, and one of 2 that does not; in the whole step 8 tokens of 4 responses,
    # the longest there can be has 10.
    counted_M = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    sequence_M = torch.tensor([0, 1, 1, 1, 2, 2])
    totals = StepTotals(tokens=8, sequences=4, longest_tokens=10)
    for name, expected in (
        ("token-mean", [1 / 8] * 4),
        ("seq-mean-token-sum", [1 / 4] * 4),
        ("seq-mean-token-mean", [1 / 4, 1 / 12, 1 / 12, 1 / 12]),
        ("seq-mean-token-sum-norm", [1 / 40] * 4),
    ):
        torch.testing.assert_close(
            AGGREGATIONS[name](counted_M, sequence_M, totals), torch.tensor([*expected, 0.0, 0.0])
        )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_step_in_which_nothing_counts_is_zero(aggregation):
    weights_M = AGGREGATIONS[aggregation](torch.zeros(3), torch.tensor([0, 0, 1]), StepTotals(0, 0, 10))
    assert weights_M.tolist() == [0, 0, 0]


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


def test_the_entropy_bonus_lowers_the_loss():
    assert entropy_loss(torch.tensor([2.0, 0.5]), 0.1).tolist() == pytest.approx([-0.2, -0.05])


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_micro_batch_without_tokens_gives_zero_on_the_graph(name):
    weights = torch.ones(3, requires_grad=True)
    none = torch.zeros(0)
    tokens = PolicyTokens(weights[:0], none, none, torch.zeros(0).long(), torch.zeros(0).bool())
    loss_M, clipped_M = POLICY_LOSSES[name].loss(tokens, how_of(name))
    weights_M = AGGREGATIONS["seq-mean-token-mean"](torch.zeros(0), tokens.sequence_M, StepTotals(5, 2, 9))
    (loss_M * weights_M).sum().backward()
    assert weights.grad.tolist() == [0, 0, 0] and not clipped_M.any()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_arguments_keep_their_values(name):
    """DeepSpeed-Chat's trainer zeroes the tail of the values it was given."""
    given = [torch.randn(5, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    before = [tensor.clone() for tensor in given]
    POLICY_LOSSES[name].loss(PolicyTokens(*given, torch.tensor([0, 0, 1, 1, 1]), torch.ones(5).bool()), how_of(name))
    assert all(torch.equal(one, two) for one, two in zip(given, before, strict=True))
