"""Every policy loss under every aggregation: its written formula, and the same number and gradient however the step's
sequences are ordered and dealt over micro-batches and ranks; PPO's clip and the value loss by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.step_losses import LONGEST, check_any_split, random_step
from tests.support.step_losses import ppo as ppo_formula
from training.step3_ppo.losses import AGGREGATIONS, POLICY_LOSSES
from training.step3_ppo.losses.losses import PolicyLossSettings, PolicyTokens, StepTotals, entropy_loss, ppo, value_loss

FORMULAS = {"ppo": ppo_formula}


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


def tokens_of(ratios: list[float], advantages: list[float]) -> PolicyTokens:
    old_M = torch.linspace(-3.0, -0.1, len(ratios))
    logprobs_M = (old_M + torch.tensor(ratios).log()).requires_grad_()
    return PolicyTokens(logprobs_M, old_M, torch.tensor(advantages), torch.zeros(len(ratios), dtype=torch.int64))


def test_the_clip_by_hand():
    # clip 0.2.                         ratio  A   -A r   -A clip(r)  larger
    #   clipped: it would gain too much   1.5   2   -3.0     -2.4      -2.4
    #   not: the loss still grows         1.5  -2    3.0      2.4       3.0
    #   not: the gain is still small      0.5   2   -1.0     -1.6      -1.0
    #   clipped                           0.5  -2    1.0      1.6       1.6
    #   inside the range                  1.1   1   -1.1     -1.1      -1.1
    tokens = tokens_of([1.5, 1.5, 0.5, 0.5, 1.1], [2.0, -2.0, 2.0, -2.0, 1.0])
    loss_M, clipped_M = ppo(tokens, PolicyLossSettings(0.2, 0.2))
    torch.testing.assert_close(loss_M, torch.tensor([-2.4, 3.0, -1.0, 1.6, -1.1]))
    assert clipped_M.tolist() == [True, False, False, True, False]
    loss_M.sum().backward()  # -A r where free, 0 where the clip is in force
    torch.testing.assert_close(tokens.logprobs_M.grad, torch.tensor([0.0, 3.0, -1.0, 0.0, -1.1]))


def test_separate_bounds_by_hand():
    # low 0.1, high 0.4, A 1: -min(r, clip(r, 0.9, 1.4));  A -1: max(r, clip(r, 0.9, 1.4))
    tokens = tokens_of([1.3, 1.5, 0.85, 0.95], [1.0, 1.0, -1.0, -1.0])
    loss_M, clipped_M = ppo(tokens, PolicyLossSettings(clip_low=0.1, clip_high=0.4))
    torch.testing.assert_close(loss_M, torch.tensor([-1.3, -1.4, 0.9, 0.95]))
    assert clipped_M.tolist() == [False, True, True, False]


def test_the_dual_clip_by_hand():
    # c 3: where A < 0 the loss is at most -3 A; where A > 0 nothing changes.
    tokens = tokens_of([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0])
    loss_M, clipped_M = ppo(tokens, PolicyLossSettings(0.2, 0.2, dual_clip=3.0))
    torch.testing.assert_close(loss_M, torch.tensor([3.0, 2.0, -1.2]))
    assert clipped_M.tolist() == [True, False, True]
    loss_M.sum().backward()
    torch.testing.assert_close(tokens.logprobs_M.grad, torch.tensor([0.0, 2.0, 0.0]))


def test_the_first_pass_has_the_policy_gradient():
    """At ratio 1 the gradient is that of -A log p, and nothing is clipped."""
    tokens = tokens_of([1.0, 1.0], [0.5, -3.0])
    loss_M, clipped_M = ppo(tokens, PolicyLossSettings(0.2, 0.2))
    loss_M.sum().backward()
    assert tokens.logprobs_M.grad.tolist() == [-0.5, 3.0] and not clipped_M.any()


@pytest.mark.parametrize("gap", [50.0, 1e4])
def test_a_policy_far_away_stays_finite(gap):
    logprobs_M = torch.tensor([0.0, -gap], requires_grad=True)
    old_M = torch.tensor([-gap, 0.0])
    tokens = PolicyTokens(logprobs_M, old_M, torch.tensor([-1.0, -1.0]), torch.zeros(2, dtype=torch.int64))
    loss_M, _ = ppo(tokens, PolicyLossSettings(0.2, 0.2))
    loss_M.sum().backward()
    assert torch.isfinite(loss_M).all() and torch.isfinite(logprobs_M.grad).all()


numbers = st.floats(-3, 3)


def test_the_value_loss_by_hand():
    # clip 0.2.                     v    old   R   (v-R)^2  clip(v)  (clip-R)^2  larger
    #   clipped: it ran ahead    1.5  1.0  2.0    0.25     1.2       0.64       0.64
    #   not: the error is larger 1.5  1.0  1.0    0.25     1.2       0.04       0.25
    #   inside the range         1.1  1.0  0.0    1.21     1.1       1.21       1.21
    #   clipped downwards        0.5  1.0  0.0    0.25     0.8       0.64       0.64
    values_M = torch.tensor([1.5, 1.5, 1.1, 0.5], requires_grad=True)
    loss_M, clipped_M = value_loss(values_M, torch.ones(4), torch.tensor([2.0, 1.0, 0.0, 0.0]), 0.2)
    torch.testing.assert_close(loss_M, torch.tensor([0.32, 0.125, 0.605, 0.32]))
    assert clipped_M.tolist() == [True, False, False, True]
    loss_M.sum().backward()
    torch.testing.assert_close(values_M.grad, torch.tensor([0.0, 0.5, 1.1, 0.0]))


def test_a_value_inside_the_range_never_counts_as_clipped():
    """old + clamp(v - old) is not v in float32: of these tokens, one in forty would have the larger error."""
    generator = torch.Generator().manual_seed(0)
    old_M, values_M, error_M = torch.randn(3, 1000, generator=generator) * 0.1
    inside_M = (values_M - old_M).abs() < 0.199
    old_M, values_M, returns_M = old_M[inside_M], values_M[inside_M], (values_M + 10 * error_M)[inside_M]
    _, clipped_M = value_loss(values_M, old_M, returns_M, 0.2)
    assert not clipped_M.any() and len(values_M) > 500


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(numbers, numbers, numbers), max_size=20))
def test_the_naive_formula_of_values(rows):
    expected = []
    for value, old, target in rows:
        held = min(max(value, old - 0.2), old + 0.2)
        expected.append(0.5 * max((value - target) ** 2, (held - target) ** 2))
    columns = [torch.tensor([row[place] for row in rows], dtype=torch.float64) for place in range(3)]
    before = [column.clone() for column in columns]
    assert value_loss(*columns, 0.2)[0].tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert all(torch.equal(one, two) for one, two in zip(columns, before, strict=True))
