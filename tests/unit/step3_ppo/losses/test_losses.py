"""Every policy loss under every aggregation: its written formula, and the same number and gradient however the step's
sequences are ordered and dealt over micro-batches and ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.step_losses import LONGEST, check_any_split, ppo, random_step
from training.step3_ppo.losses import AGGREGATIONS, POLICY_LOSSES
from training.step3_ppo.losses.losses import PolicyLossSettings, PolicyTokens, StepTotals, entropy_loss

FORMULAS = {"ppo": ppo}


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
