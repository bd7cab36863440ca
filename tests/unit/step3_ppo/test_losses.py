"""PPO's losses against numbers worked by hand and naive float64 formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.step3_ppo.losses import policy_loss, pretraining_loss, value_loss

numbers = st.floats(-3, 3)
tokens = st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=20)
cuts = st.lists(st.integers(0, 20), max_size=4)


def columns(rows, dtype=torch.float64) -> list[torch.Tensor]:
    return [torch.tensor(column, dtype=dtype) for column in zip(*rows, strict=True)]


def split(whole: list[torch.Tensor], at: list[int]) -> list[list[torch.Tensor]]:
    length = len(whole[0])
    edges = [0, *sorted(min(cut, length) for cut in at), length]
    return [[column[a:b] for column in whole] for a, b in zip(edges, edges[1:], strict=False)]


def test_the_policy_loss_by_hand():
    # clip 0.2, 10 tokens in the step.  ratio  A   -A r   -A clip(r)  larger
    #   clipped: it would gain too much   1.5   2   -3.0     -2.4      -2.4
    #   not: the loss still grows         1.5  -2    3.0      2.4       3.0
    #   not: the gain is still small      0.5   2   -1.0     -1.6      -1.0
    #   clipped                           0.5  -2    1.0      1.6       1.6
    #   inside the range                  1.1   1   -1.1     -1.1      -1.1    sum 0.1
    ratio_M = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantages_M = torch.tensor([2.0, -2.0, 2.0, -2.0, 1.0])
    old_M = torch.tensor([-1.0, -2.0, -0.5, -3.0, -0.1])
    logprobs_M = (old_M + ratio_M.log()).requires_grad_()
    loss, sums = policy_loss(logprobs_M, old_M, advantages_M, clip_range=0.2, tokens_in_step=10)
    assert loss.item() == pytest.approx(0.01, abs=1e-6)
    assert sums["clipped"] == 2
    assert sums["ratio"] == pytest.approx(5.1)
    assert sums["kl"] == pytest.approx(-(2 * math.log(1.5) + 2 * math.log(0.5) + math.log(1.1)), abs=1e-6)
    loss.backward()  # -A r / 10 where free, 0 where the clip is in force
    torch.testing.assert_close(logprobs_M.grad, torch.tensor([0.0, 0.3, -0.1, 0.0, -0.11]))


def test_the_first_pass_has_the_policy_gradient():
    """At ratio 1 the gradient is that of -A log p, and nothing is clipped."""
    logprobs_M = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, sums = policy_loss(logprobs_M, logprobs_M.detach().clone(), torch.tensor([0.5, -3.0]), 0.2, 2)
    loss.backward()
    assert logprobs_M.grad.tolist() == [-0.25, 1.5]
    assert sums == {"clipped": 0.0, "ratio": 2.0, "kl": 0.0}


def test_no_advantage_moves_nothing():
    logprobs_M = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, _ = policy_loss(logprobs_M, torch.tensor([-3.0, -1.0]), torch.zeros(2), 0.2, 2)
    loss.backward()
    assert logprobs_M.grad.tolist() == [0, 0]


@settings(max_examples=80, deadline=None)
@given(tokens, cuts)
def test_the_policy_loss_is_the_naive_formula_in_parts_of_any_size(rows, at):
    whole = columns(rows)
    expected = clipped = 0.0
    for logprob, old, advantage in rows:
        ratio = math.exp(logprob - old)
        free, held = ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage
        expected -= min(free, held) / 9
        clipped += held < free
    parts = [policy_loss(*part, 0.2, 9) for part in split(whole, at)]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert sum(sums["clipped"] for _, sums in parts) == clipped


def test_the_value_loss_by_hand():
    # clip 0.2, 4 tokens.         v    old   R   (v-R)^2  clip(v)  (clip-R)^2  larger
    #   clipped: it ran ahead    1.5  1.0  2.0    0.25     1.2       0.64       0.64
    #   not: the error is larger 1.5  1.0  1.0    0.25     1.2       0.04       0.25
    #   inside the range         1.1  1.0  0.0    1.21     1.1       1.21       1.21
    #   clipped downwards        0.5  1.0  0.0    0.25     0.8       0.64       0.64   sum 2.74
    values_M = torch.tensor([1.5, 1.5, 1.1, 0.5], requires_grad=True)
    loss, sums = value_loss(values_M, torch.ones(4), torch.tensor([2.0, 1.0, 0.0, 0.0]), 0.2, 4)
    assert loss.item() == pytest.approx(2.74 / 2 / 4)
    assert sums == {"clipped": 2.0}
    loss.backward()
    torch.testing.assert_close(values_M.grad, torch.tensor([0.0, 0.125, 0.275, 0.0]))


def test_a_value_inside_the_range_never_counts_as_clipped():
    """old + clamp(v - old) is not v in float32: of these tokens, one in forty would have the larger error."""
    generator = torch.Generator().manual_seed(0)
    old_M, values_M, error_M = torch.randn(3, 1000, generator=generator) * 0.1
    inside_M = (values_M - old_M).abs() < 0.199
    old_M, values_M, returns_M = old_M[inside_M], values_M[inside_M], (values_M + 10 * error_M)[inside_M]
    _, sums = value_loss(values_M, old_M, returns_M, 0.2, 1000)
    assert sums["clipped"] == 0 and len(values_M) > 500


@settings(max_examples=80, deadline=None)
@given(tokens, cuts)
def test_the_value_loss_is_the_naive_formula_in_parts_of_any_size(rows, at):
    expected = 0.0
    for value, old, target in rows:
        held = min(max(value, old - 0.2), old + 0.2)
        expected += 0.5 * max((value - target) ** 2, (held - target) ** 2) / 9
    parts = [value_loss(*part, 0.2, 9)[0].item() for part in split(columns(rows), at)]
    assert sum(parts) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_the_pretraining_loss_by_hand():
    logprobs_M = torch.log(torch.tensor([0.5, 0.125])).requires_grad_()
    loss = pretraining_loss(logprobs_M, coefficient=3.0, tokens_in_step=6)
    assert loss.item() == pytest.approx(3 * 4 * math.log(2) / 6)
    loss.backward()
    assert logprobs_M.grad.tolist() == [-0.5, -0.5]


def test_a_micro_batch_without_tokens_gives_zero_on_the_graph():
    for loss_of in (
        lambda empty: policy_loss(empty, empty.detach(), empty.detach(), 0.2, 5),
        lambda empty: value_loss(empty, empty.detach(), empty.detach(), 0.2, 5),
        lambda empty: (pretraining_loss(empty, 2.0, 5), {}),
    ):
        weights = torch.ones(3, requires_grad=True)
        loss, sums = loss_of(weights[:0])
        loss.backward()
        assert loss.item() == 0.0 and weights.grad.tolist() == [0, 0, 0]
        assert all(value == 0 for value in sums.values())


def test_arguments_keep_their_values():
    """DeepSpeed-Chat's trainer zeroes the tail of the values it was given."""
    given = [torch.randn(5, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    before = [tensor.clone() for tensor in given]
    policy_loss(*given, 0.2, 5)
    value_loss(*given, 0.2, 5)
    assert all(torch.equal(one, two) for one, two in zip(given, before, strict=True))
