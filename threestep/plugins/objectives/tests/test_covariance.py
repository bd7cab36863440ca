"""Losses that hold tokens back by their covariance: which tokens, and what becomes of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.invariants.test_float64 import judge
from tests.support.step_losses import LONGEST, Response, check_any_split, ppo, random_step
from threestep.plugins.objectives.covariance import (
    covariance_sums,
    covariances,
    drawn_between,
    most_covariant,
    smallest_selected_key,
    tokens_to_select,
)
from threestep.plugins.objectives.policy_losses import ClipCovArguments, KlCovArguments
from training.step3_ppo.experience.sequences import TrainingSequence
from training.step3_ppo.losses import AGGREGATIONS, POLICY_LOSSES
from training.step3_ppo.losses.losses import PolicyLossSettings, PolicyTokens
from training.utils.contracts.documents import join

KL = KlCovArguments(cov_share=0.3, kl_cov_coef=0.7)
CLIP = ClipCovArguments(cov_share=0.3, clip_cov_low=-0.5, clip_cov_high=0.5)
HOW = {"kl_cov": PolicyLossSettings(0.15, 0.3, options=KL), "clip_cov": PolicyLossSettings(0.15, 0.3, options=CLIP)}
FORMULAS = {
    "kl_cov": lambda d, a, logp, row, picked: -math.exp(d) * a + (0.7 * abs(d) if picked else 0.0),
    "clip_cov": lambda d, a, logp, row, picked: 0.0 if picked else ppo(d, a, logp, row, picked),
}


def sequences_of(step: list[Response]) -> list[TrainingSequence]:
    """With ids of their own, so that none is read as another is."""
    found = []
    for number, each in enumerate(step):
        ids = torch.arange(len(each.old) + 1) + 1000 * number
        tokens = join(ids[:1], ids[1:])
        found.append(TrainingSequence(number, tokens, each.counts, each.advantages, each.old, None, None, None, None))
    return found


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", FORMULAS)
@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, LONGEST), min_size=1, max_size=7), st.integers(0, 99), st.integers(1, 4))
def test_the_written_formula_and_any_split(loss, aggregation, lengths, seed, count):
    step = random_step(lengths, seed)
    tokens = float(sum(len(each.old) for each in step if each.counts))
    selected = POLICY_LOSSES[loss].selects(sequences_of(step), HOW[loss], tokens, seed)
    picked = [selected[number] for number in range(len(step))]
    check_any_split(loss, FORMULAS[loss], aggregation, step, seed, count, picked=picked, options=HOW[loss].options)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, LONGEST), min_size=1, max_size=7), st.integers(0, 99))
def test_the_selected_tokens_line_by_line(lengths, seed):
    """KL-Cov has those of the largest covariance among all that count, Clip-Cov as many of those between its bounds;
    the order of the sequences decides nothing."""
    step = random_step(lengths, seed)
    rows = [[*zip(each.old.tolist(), each.advantages.tolist(), strict=True)] for each in step]
    counted = [pair for row, each in zip(rows, step, strict=True) if each.counts for pair in row]
    tokens = len(counted)
    if not tokens:
        return
    old, advantage = (sum(pair[side] for pair in counted) / tokens for side in (0, 1))
    covariance = [[(a - advantage) * (o - old) for o, a in row] for row in rows]
    ranked = sorted((c for own, each in zip(covariance, step, strict=True) if each.counts for c in own), reverse=True)
    most = max(1, int(0.3 * tokens))
    got = most_covariant(sequences_of(step), HOW["kl_cov"], float(tokens), seed)
    for own, number in zip(covariance, range(len(step)), strict=True):
        for c, one in zip(own, got[number].tolist(), strict=True):
            assert one == (c > ranked[most - 1]) or abs(c - ranked[most - 1]) < 1e-12
    got = drawn_between(sequences_of(step), HOW["clip_cov"], float(tokens), seed)
    again = drawn_between(sequences_of(step)[::-1], HOW["clip_cov"], float(tokens), seed)
    assert all(torch.equal(got[number], again[number]) for number in got)
    drawn = [
        c for own, number in zip(covariance, got, strict=True) for c, one in zip(own, got[number], strict=True) if one
    ]
    assert all(-0.5 < c < 0.5 for c in drawn)
    between = sum(-0.5 < c < 0.5 for c in ranked)
    among_counted = sum(int(got[number].sum()) for number, each in enumerate(step) if each.counts)
    assert among_counted == min(most, between)


def test_equal_responses_are_selected_together():
    """Their old log-probabilities differ by rounding, which may not decide which of them KL-Cov holds back."""
    [first] = sequences_of(random_step([6], 0))
    for rounding in (1e-7, -1e-7):
        twin = replace(first, number=1, old_logprobs_r=first.old_logprobs_r + rounding)
        how = PolicyLossSettings(0.2, 0.2, options=KlCovArguments())
        one, other = most_covariant([first, twin], how, 6.0, 7).values()
        assert one.equal(other) and int(one.sum()) == 1


def test_the_selection_computes_in_float64():
    step = random_step([5, 3, 1], 0)
    for select, how in ((most_covariant, HOW["kl_cov"]), (drawn_between, HOW["clip_cov"])):
        judge(lambda select=select, how=how: list(select(sequences_of(step), how, 9.0, 3).values()))


def test_the_choice_of_kl_cov_by_hand():
    # A 1, 2, 3, mean 2; logp -3, -2, -1, mean -2: covariances (-1)(-1) = 1, 0, 1. Two of three are chosen.
    advantages_M, old_M = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-3.0, -2.0, -1.0])
    covariance_M = covariances(advantages_M, old_M, covariance_sums(advantages_M, old_M))
    assert covariance_M.tolist() == [1.0, 0.0, 1.0]
    assert smallest_selected_key(covariance_M, 1) == smallest_selected_key(covariance_M, 2) == 1.0  # a tie: both
    assert smallest_selected_key(covariance_M, 3) == smallest_selected_key(covariance_M, 4) == 0.0
    nobody_M = torch.full_like(covariance_M, float("-inf"))
    assert not (nobody_M >= smallest_selected_key(nobody_M, 1)).any()
    assert tokens_to_select(2e-4, 100) == 1 and tokens_to_select(0.5, 7) == 3


@pytest.mark.parametrize(("name", "said"), [("kl_cov", "KL-Cov needs"), ("clip_cov", "Clip-Cov needs")])
def test_selected_tokens_that_are_missing_are_said(name, said):
    one = torch.ones(1)
    with pytest.raises(AssertionError, match=said):
        POLICY_LOSSES[name].loss(PolicyTokens(one, one, one, torch.zeros(1).long()), HOW[name])


def test_rounding_of_the_same_policy_pulls_no_token_of_kl_cov():
    """Advantages of 0: what is left of the gradient is the penalty's."""
    old_M = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounded_M = old_M.float().double().requires_grad_()  # up to 1e-7 apart
    nothing_M = torch.zeros_like(old_M)
    tokens = PolicyTokens(rounded_M, old_M, nothing_M, nothing_M.long(), torch.ones_like(old_M, dtype=torch.bool))
    loss_M, _ = POLICY_LOSSES["kl_cov"].loss(tokens, HOW["kl_cov"])
    loss_M.sum().backward()
    assert rounded_M.grad.abs().max() < 1e-3 * KL.kl_cov_coef


def test_the_pull_of_kl_cov_by_hand():
    """coefficient x (d / 1e-3)^2 of d's sign, from 1e-3 nats on the coefficient."""
    difference_M = torch.tensor([0.0, 1e-6, 5e-4, -5e-4, 1e-3, -2e-3, 3.0], dtype=torch.float64)
    logprobs_M, nothing_M = difference_M.clone().requires_grad_(), torch.zeros_like(difference_M)
    tokens = PolicyTokens(logprobs_M, nothing_M, nothing_M, nothing_M.long(), nothing_M == 0)
    loss_M, _ = POLICY_LOSSES["kl_cov"].loss(
        tokens, PolicyLossSettings(0.2, 0.2, options=KlCovArguments(kl_cov_coef=2.0))
    )
    loss_M.sum().backward()
    torch.testing.assert_close(loss_M.detach(), 2.0 * difference_M.abs())
    expected = [0.0, 2e-6, 0.5, -0.5, 2.0, -2.0, 2.0]
    torch.testing.assert_close(logprobs_M.grad, torch.tensor(expected, dtype=torch.float64))
