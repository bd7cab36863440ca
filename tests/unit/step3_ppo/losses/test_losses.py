"""Every policy loss under every aggregation: its written formula, and the same number and gradient however the step's
sequences are ordered and dealt over micro-batches and ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.step3_ppo.losses import AGGREGATIONS, POLICY_LOSSES
from training.step3_ppo.losses.added import entropy_loss
from training.step3_ppo.losses.aggregation import StepTotals
from training.step3_ppo.losses.covariance import (
    clip_cov_keys,
    covariance_sums,
    covariances,
    kl_cov_keys,
    smallest_selected_key,
    tokens_to_select,
)
from training.step3_ppo.losses.tokens import PolicyLossSettings, PolicyTokens

HOW = PolicyLossSettings(0.15, 0.3, dual_clip=2.0, kl_cov_coef=0.7, sapo_tau_pos=1.5, sapo_tau_neg=2.5)
SHARE, COV_LOW, COV_HIGH = 0.3, -0.5, 0.5
LONGEST = 9


class Sequence(NamedTuple):
    """Columns of one response, float64; `counts` is False where it is left out of the loss."""

    logprobs: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor
    noise: torch.Tensor
    counts: bool


def random_step(lengths: list[int], seed: int) -> list[Sequence]:
    generator = torch.Generator().manual_seed(seed)
    step = []
    for index, length in enumerate(lengths):
        old, advantages, move = torch.randn(3, length, generator=generator, dtype=torch.float64)
        noise = torch.rand(length, generator=generator, dtype=torch.float64)
        step.append(Sequence(old + 0.4 * move, old, advantages, noise, counts=(index + seed) % 4 != 3))
    return step


# --- the written formulas, one token at a time; row: (d, a) of its sequence, picked: chosen by KL- or Clip-Cov


def _held(ratio: float) -> float:
    return min(max(ratio, 1 - 0.15), 1 + 0.3)


def _clipped(ratio: float, a: float) -> float:
    return -min(ratio * a, _held(ratio) * a)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _geo_mean(d, a, logp, row, picked):
    held = [min(d, 0.3) if a > 0 else max(d, -0.15) for d, a in row]
    return -_mean([a for _, a in row]) * math.exp(_mean(held))


def _sapo(d, a, logp, row, picked):
    tau = 1.5 if a > 0 else 2.5
    return -a * 4 / tau / (1 + math.exp(-tau * (math.exp(d) - 1)))


def _ppo(d, a, logp, row, picked):
    loss = _clipped(math.exp(d), a)
    return min(loss, -2.0 * a) if a < 0 else loss


FORMULAS = {
    "ppo": _ppo,
    "gspo": lambda d, a, logp, row, picked: _clipped(math.exp(_mean([d for d, _ in row])), a),
    "cispo": lambda d, a, logp, row, picked: -_held(math.exp(d)) * a * logp,
    "geo_mean": _geo_mean,
    "sapo": _sapo,
    "gpg": lambda d, a, logp, row, picked: -a * logp,
    "kl_cov": lambda d, a, logp, row, picked: -math.exp(d) * a + (0.7 * abs(d) if picked else 0.0),
    "clip_cov": lambda d, a, logp, row, picked: 0.0 if picked else _ppo(d, a, logp, row, picked),
}
# Weight of one token of a sequence of `own` tokens in a step of `tokens` tokens and `sequences` sequences.
WEIGHTS = {
    "token-mean": lambda own, tokens, sequences: 1 / tokens,
    "seq-mean-token-sum": lambda own, tokens, sequences: 1 / sequences,
    "seq-mean-token-mean": lambda own, tokens, sequences: 1 / (sequences * own),
    "seq-mean-token-sum-norm": lambda own, tokens, sequences: 1 / (sequences * LONGEST),
}


def naive(step: list[Sequence], loss: str, aggregation: str) -> float:
    counted = [item for item in step if item.counts]
    rows = [
        [tuple(column.tolist()) for column in item[:4]] for item in counted
    ]  # logprobs, old, advantages, noise of each
    tokens = sum(len(row[0]) for row in rows)
    if tokens == 0:
        return 0.0
    mean_a = sum(a for row in rows for a in row[2]) / tokens
    mean_old = sum(old for row in rows for old in row[1]) / tokens
    keys = [
        [
            ((a - mean_a) * (old - mean_old) if loss == "kl_cov" else u)
            if loss == "kl_cov" or COV_LOW < (a - mean_a) * (old - mean_old) < COV_HIGH
            else -math.inf
            for old, a, u in zip(*row[1:], strict=True)
        ]
        for row in rows
    ]
    ranked = sorted((key for row in keys for key in row if key > -math.inf), reverse=True)
    bound = ranked[: max(1, int(SHARE * tokens))][-1] if ranked else math.inf
    total = 0.0
    for row, own_keys in zip(rows, keys, strict=True):
        own = len(row[0])
        differences = [new - old for new, old in zip(row[0], row[1], strict=True)]
        for d, a, logp, key in zip(differences, row[2], row[0], own_keys, strict=True):
            one = FORMULAS[loss](d, a, logp, list(zip(differences, row[2], strict=True)), key >= bound)
            total += one * WEIGHTS[aggregation](own, tokens, len(rows))
    return total


def columns(items: list[Sequence], place: int) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.float64), *(item[place] for item in items)])


def dealt(step: list[Sequence], loss: str, aggregation: str, parts: list[list[int]]) -> tuple[float, torch.Tensor]:
    """The step's loss and gradient from `parts`, micro-batches of any ranks, by the package's own functions."""
    entry = POLICY_LOSSES[loss]
    counted = [item for item in step if item.counts]
    totals = StepTotals(sum(len(item.old) for item in counted), len(counted), LONGEST)
    shares = [[step[index] for index in part if step[index].counts] for part in parts]
    sums = sum(covariance_sums(columns(share, 2), columns(share, 1)) for share in shares)
    count = tokens_to_select(SHARE, totals.tokens)

    def keys(items: list[Sequence]) -> torch.Tensor:
        covariance_M = covariances(columns(items, 2), columns(items, 1), sums)
        return (entry.keys or kl_cov_keys)(covariance_M, columns(items, 3), COV_LOW, COV_HIGH)

    bound = smallest_selected_key(torch.cat([keys(share) for share in shares]), count)
    leaves = [item.logprobs.clone().requires_grad_() for item in step]
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        items = [step[index] for index in part]
        lengths = torch.tensor([len(item.old) for item in items], dtype=torch.int64)
        sequence_M = torch.repeat_interleave(torch.arange(len(items)), lengths)
        counted_M = torch.repeat_interleave(torch.tensor([float(item.counts) for item in items]).double(), lengths)
        logprobs_M = torch.cat([torch.empty(0, dtype=torch.float64), *(leaves[index] for index in part)])
        picked_M = keys(items) >= bound
        tokens = PolicyTokens(logprobs_M, columns(items, 1), columns(items, 2), sequence_M, picked_M)
        loss_M, _ = entry.loss(tokens, HOW)
        total = total + (loss_M * AGGREGATIONS[aggregation](counted_M, sequence_M, totals)).sum()
    total.backward()
    return total.item(), torch.cat([leaf.grad for leaf in leaves])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", POLICY_LOSSES)
@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, LONGEST), min_size=1, max_size=7), st.integers(0, 99), st.integers(1, 4))
def test_the_written_formula_and_any_split(loss, aggregation, lengths, seed, count):
    step = random_step(lengths, seed)
    want, want_grad = dealt(step, loss, aggregation, [list(range(len(step)))])
    assert want == pytest.approx(naive(step, loss, aggregation), rel=1e-9, abs=1e-9)
    order = torch.randperm(len(step), generator=torch.Generator().manual_seed(seed)).tolist()
    parts = [order[start::count] for start in range(count)] + [[]]  # some have no sequence at all
    got, got_grad = dealt(step, loss, aggregation, parts)
    assert got == pytest.approx(want, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-9, atol=1e-9)
    assert not got_grad[torch.cat([torch.full_like(item.old, float(not item.counts)) for item in step]) > 0].any()


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
    loss_M, clipped_M = POLICY_LOSSES["sapo"].loss(tokens, PolicyLossSettings(0.2, 0.2))
    assert loss_M.tolist() == pytest.approx([-10.0, 4 / 1.05, -3.5232], abs=1e-4) and not clipped_M.any()
    loss_M.sum().backward()
    assert logprobs_M.grad.tolist() == pytest.approx([-5.0, 2.0, -1.2599], abs=1e-4)


def test_the_choice_of_kl_cov_by_hand():
    # A 1, 2, 3, mean 2; logp -3, -2, -1, mean -2: covariances (-1)(-1) = 1, 0, 1. Two of three are chosen.
    advantages_M, old_M = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-3.0, -2.0, -1.0])
    covariance_M = covariances(advantages_M, old_M, covariance_sums(advantages_M, old_M))
    assert covariance_M.tolist() == [1.0, 0.0, 1.0]
    assert smallest_selected_key(covariance_M, 1) == smallest_selected_key(covariance_M, 2) == 1.0  # a tie: both
    assert smallest_selected_key(covariance_M, 3) == smallest_selected_key(covariance_M, 4) == 0.0
    noise_M = torch.tensor([0.1, 0.2, 0.9])
    keys_M = clip_cov_keys(covariance_M, noise_M, low=0.5, high=5.0)
    assert (keys_M >= smallest_selected_key(keys_M, 1)).tolist() == [False, False, True]
    nobody_M = clip_cov_keys(covariance_M, noise_M, low=2.0, high=5.0)
    assert not (nobody_M >= smallest_selected_key(nobody_M, 1)).any()
    assert tokens_to_select(2e-4, 100) == 1 and tokens_to_select(0.5, 7) == 3


@pytest.mark.parametrize(("name", "said"), [("kl_cov", "KL-Cov needs"), ("clip_cov", "Clip-Cov needs")])
def test_selected_tokens_that_are_missing_are_said(name, said):
    one = torch.ones(1)
    with pytest.raises(AssertionError, match=said):
        POLICY_LOSSES[name].loss(PolicyTokens(one, one, one, torch.zeros(1).long()), HOW)


def test_the_entropy_bonus_lowers_the_loss():
    assert entropy_loss(torch.tensor([2.0, 0.5]), 0.1).tolist() == pytest.approx([-0.2, -0.05])


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_micro_batch_without_tokens_gives_zero_on_the_graph(name):
    weights = torch.ones(3, requires_grad=True)
    none = torch.zeros(0)
    tokens = PolicyTokens(weights[:0], none, none, torch.zeros(0).long(), torch.zeros(0).bool())
    loss_M, clipped_M = POLICY_LOSSES[name].loss(tokens, HOW)
    weights_M = AGGREGATIONS["seq-mean-token-mean"](torch.zeros(0), tokens.sequence_M, StepTotals(5, 2, 9))
    (loss_M * weights_M).sum().backward()
    assert weights.grad.tolist() == [0, 0, 0] and not clipped_M.any()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_arguments_keep_their_values(name):
    """DeepSpeed-Chat's trainer zeroes the tail of the values it was given."""
    given = [torch.randn(5, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    before = [tensor.clone() for tensor in given]
    POLICY_LOSSES[name].loss(PolicyTokens(*given, torch.tensor([0, 0, 1, 1, 1]), torch.ones(5).bool()), HOW)
    assert all(torch.equal(one, two) for one, two in zip(given, before, strict=True))


def test_rounding_of_the_same_policy_pulls_no_token_of_kl_cov():
    """Advantages of 0: what is left of the gradient is the penalty's."""
    old_M = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounded_M = old_M.float().double().requires_grad_()  # up to 1e-7 apart
    nothing_M = torch.zeros_like(old_M)
    tokens = PolicyTokens(rounded_M, old_M, nothing_M, nothing_M.long(), torch.ones_like(old_M, dtype=torch.bool))
    loss_M, _ = POLICY_LOSSES["kl_cov"].loss(tokens, HOW)
    loss_M.sum().backward()
    assert rounded_M.grad.abs().max() < 1e-3 * HOW.kl_cov_coef


def test_the_pull_of_kl_cov_by_hand():
    """coefficient x (d / 1e-3)^2 of d's sign, from 1e-3 nats on the coefficient."""
    difference_M = torch.tensor([0.0, 1e-6, 5e-4, -5e-4, 1e-3, -2e-3, 3.0], dtype=torch.float64)
    logprobs_M, nothing_M = difference_M.clone().requires_grad_(), torch.zeros_like(difference_M)
    tokens = PolicyTokens(logprobs_M, nothing_M, nothing_M, nothing_M.long(), nothing_M == 0)
    loss_M, _ = POLICY_LOSSES["kl_cov"].loss(tokens, dataclasses.replace(HOW, kl_cov_coef=2.0))
    loss_M.sum().backward()
    torch.testing.assert_close(loss_M.detach(), 2.0 * difference_M.abs())
    expected = [0.0, 2e-6, 0.5, -0.5, 2.0, -2.0, 2.0]
    torch.testing.assert_close(logprobs_M.grad, torch.tensor(expected, dtype=torch.float64))
