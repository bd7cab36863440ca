"""Policy losses and estimators of advantages: by hand, by their formulas, and however a step is split."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.invariants.test_float64 import judge
from tests.support.estimator_inputs import (
    HOW,
    ROOT3,
    WITHOUT_STD,
    check_formula,
    how_of,
    random_inputs,
    spread,
    table_inputs,
)
from tests.support.step_losses import LONGEST, Response, check_any_split, clipped, held, mean, ppo, random_step
from tests.unit.step3_ppo.flags.test_arguments import mistakes_of
from threestep.plugins.objectives.checks import check
from threestep.plugins.objectives.covariance import (
    covariance_sums,
    covariances,
    drawn_between,
    most_covariant,
    smallest_selected_key,
    tokens_to_select,
)
from threestep.plugins.objectives.policy_losses import ClipCovArguments, KlCovArguments, SapoArguments
from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.advantages.inputs import AdvantageInputs
from training.step3_ppo.experience.sequences import TrainingSequence
from training.step3_ppo.flags.arguments import AlgorithmArguments
from training.step3_ppo.losses import AGGREGATIONS, POLICY_LOSSES
from training.step3_ppo.losses.losses import PolicyLossSettings, PolicyTokens
from training.utils.base.errors import Mistakes
from training.utils.contracts.documents import join

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


KL = KlCovArguments(cov_share=0.3, kl_cov_coef=0.7)
CLIP = ClipCovArguments(cov_share=0.3, clip_cov_low=-0.5, clip_cov_high=0.5)
HELD_BACK = {
    "kl_cov": PolicyLossSettings(0.15, 0.3, options=KL),
    "clip_cov": PolicyLossSettings(0.15, 0.3, options=CLIP),
}
COVARIANCE_FORMULAS = {
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
@pytest.mark.parametrize("loss", COVARIANCE_FORMULAS)
@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, LONGEST), min_size=1, max_size=7), st.integers(0, 99), st.integers(1, 4))
def test_the_covariance_formula_and_any_split(loss, aggregation, lengths, seed, count):
    step = random_step(lengths, seed)
    tokens = float(sum(len(each.old) for each in step if each.counts))
    selected = POLICY_LOSSES[loss].selects(sequences_of(step), HELD_BACK[loss], tokens, seed)
    picked = [selected[number] for number in range(len(step))]
    check_any_split(
        loss, COVARIANCE_FORMULAS[loss], aggregation, step, seed, count, picked=picked, options=HELD_BACK[loss].options
    )


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
    got = most_covariant(sequences_of(step), HELD_BACK["kl_cov"], float(tokens), seed)
    for own, number in zip(covariance, range(len(step)), strict=True):
        for c, one in zip(own, got[number].tolist(), strict=True):
            assert one == (c > ranked[most - 1]) or abs(c - ranked[most - 1]) < 1e-12
    got = drawn_between(sequences_of(step), HELD_BACK["clip_cov"], float(tokens), seed)
    again = drawn_between(sequences_of(step)[::-1], HELD_BACK["clip_cov"], float(tokens), seed)
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
    for select, how in ((most_covariant, HELD_BACK["kl_cov"]), (drawn_between, HELD_BACK["clip_cov"])):
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
        POLICY_LOSSES[name].loss(PolicyTokens(one, one, one, torch.zeros(1).long()), HELD_BACK[name])


def test_rounding_of_the_same_policy_pulls_no_token_of_kl_cov():
    """Advantages of 0: what is left of the gradient is the penalty's."""
    old_M = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounded_M = old_M.float().double().requires_grad_()  # up to 1e-7 apart
    nothing_M = torch.zeros_like(old_M)
    tokens = PolicyTokens(rounded_M, old_M, nothing_M, nothing_M.long(), torch.ones_like(old_M, dtype=torch.bool))
    loss_M, _ = POLICY_LOSSES["kl_cov"].loss(tokens, HELD_BACK["kl_cov"])
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


# Group 7: outcomes R = 1, 4, 1, lengths 1, 3, 2; mean 2, deviations -1, 2, -1, std = sqrt((1 + 4 + 1) / 2) = sqrt 3.
TABLE = {
    # best - second = 4 - 1 = 3, over std
    "grpo_passk": [[0, 0, 0], [3 / ROOT3] * 3, [0, 0, 0], [0, 0, 0]],
    # baseline (1 x 1 + 3 x 4 + 2 x 1) / 6 = 2.5
    "opo": [[-1.5, 0, 0], [1.5, 1.5, 1.5], [-1.5, -1.5, 0], [0, 0, 0]],
    # R - mean, times alpha = 4 sequences / 3 that are in a group with different outcomes
    "gpg": [[-4 / 3, 0, 0], [8 / 3] * 3, [-4 / 3, -4 / 3, 0], [0, 0, 0]],
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table_worked_by_hand(name):
    advantages_BR, returns_BR = ESTIMATORS[name].estimate(table_inputs(), HOW)
    torch.testing.assert_close(advantages_BR, torch.tensor(TABLE[name], dtype=torch.float32), rtol=1e-5, atol=1e-6)
    assert returns_BR is None


def test_grpo_passk_without_a_deviation_and_with_that_of_the_batch():
    """Outcomes 1, 4, 1 and 2.5, 0.5 of two prompts, whose variance over all five is 2.075."""
    advantages_BR, _ = ESTIMATORS["grpo_passk"].estimate(table_inputs(), WITHOUT_STD)
    assert advantages_BR.tolist() == [[0, 0, 0], [3, 3, 3], [0, 0, 0], [0, 0, 0]]  # best - second
    outcomes_BR = torch.tensor([[1.0], [4.0], [1.0], [2.5], [0.5]])
    inputs = AdvantageInputs(outcomes_BR, torch.ones(5).long(), torch.tensor([0, 0, 0, 1, 1]))
    got_BR, _ = ESTIMATORS["grpo_passk"].estimate(inputs, replace(HOW, norm_over="batch"))
    torch.testing.assert_close(got_BR[:, 0], torch.tensor([0.0, 3.0, 0.0, 2.0, 0.0]) / 2.075**0.5, rtol=1e-5, atol=1e-5)


def _passk(R, L, i, **_):  # noqa: N803
    if len(R) == 1 or R[i] < max(R):
        return 0.0
    best, second = sorted(R, reverse=True)[:2]
    return (best - second) / (statistics.stdev(R) + 1e-6)


GROUP_FORMULAS = {
    "grpo_passk": spread(_passk),
    "opo": spread(lambda R, L, i, **_: R[i] - sum(a * b for a, b in zip(L, R, strict=True)) / sum(L)),  # noqa: N803
    "gpg": spread(lambda R, L, i, alpha, **_: alpha * (R[i] - statistics.fmean(R))),  # noqa: N803
}


@pytest.mark.parametrize("name", GROUP_FORMULAS)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(0, 99))
def test_the_written_formula_on_ragged_groups(name, lengths_of_groups, seed):
    check_formula(name, GROUP_FORMULAS[name], random_inputs(lengths_of_groups, seed))


def test_the_token_baseline_by_hand():
    # G_t with gamma 1: 1; 4, 4, 3; 1, 2.  w = 1 - 2 p + sum p^2: 0.5; 0.5, 0.5, 1; 1, 0.5,  W: 0.5; 0.5, 1, 2; 1, 1.5.
    #   t = 0  B = (1 x 0.5 + 4 x 0.5 + 1 x 1) / 2 = 1.75
    #   t = 1  B = (4 x 1 + 2 x 1.5) / 2.5 = 2.8
    #   t = 2  the second response alone: B = 0, as for all of the second prompt's, whose G is 2.5, 2
    got_BR, returns_BR = ESTIMATORS["optimal_token_baseline"].estimate(table_inputs(), how_of("optimal_token_baseline"))
    want_BR = torch.tensor([[-0.75, 0, 0], [2.25, 1.2, 3], [-0.75, -0.8, 0], [2.5, 2, 0]])
    torch.testing.assert_close(got_BR, want_BR, rtol=1e-5, atol=1e-6)
    assert returns_BR is None


def test_a_tail_that_learns_nothing():
    """Where only one response goes on, its own return is the baseline."""
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        advantages_BR, _ = ESTIMATORS[name].estimate(table_inputs(), how_of(name, otb_zero_tail=False))
        want = torch.tensor([[-0.75, 0, 0], [2.25, 1.2, 0], [-0.75, -0.8, 0], [0, 0, 0]])
        torch.testing.assert_close(advantages_BR, want, rtol=1e-5, atol=1e-6)


def test_weights_of_a_mismatch_weigh_the_energy_by_their_squares():
    """Weight 2 on the third response's first token: w 4, 0.5, so B_0 = (0.5 + 2 + 4) / 5 = 1.3 and, with W 4.5 there,
    B_1 = (4 x 1 + 2 x 4.5) / 5.5 = 26 / 11."""
    weights_BR = torch.ones(4, 3)
    weights_BR[2, 0] = 2.0
    got_BR, _ = ESTIMATORS["optimal_token_baseline"].estimate(
        replace(table_inputs(), weights_BR=weights_BR), how_of("optimal_token_baseline")
    )
    want = torch.tensor([[-0.3, 0, 0], [2.7, 18 / 11, 3], [-0.3, -4 / 11, 0]])
    torch.testing.assert_close(got_BR[:3], want, rtol=1e-5, atol=1e-6)


def test_a_policy_without_a_choice_has_the_mean_as_its_baseline():
    """Probability 1: w and W are 0; B_0 = (1 + 4 + 1) / 3, B_1 = (4 + 2) / 2, and none for a response alone."""
    inputs = replace(table_inputs(), logprobs_BR=torch.zeros(4, 3), collisions_BR=torch.ones(4, 3))
    got_BR, _ = ESTIMATORS["optimal_token_baseline"].estimate(inputs, how_of("optimal_token_baseline"))
    assert got_BR.tolist() == [[-1, 0, 0], [2, 1, 3], [-1, -1, 0], [2.5, 2, 0]]


def otb_line_by_line(inputs: AdvantageInputs, zero_tail: bool) -> list[list[float]]:
    """The optimal token baseline as it is written, token by token: every sum over the group's responses in Python."""
    length, group = inputs.response_lengths_B.tolist(), inputs.group_B.tolist()
    rows = range(len(length))
    to_go = [{t: float(inputs.rewards_BR[b, t : length[b]].sum()) for t in range(length[b])} for b in rows]
    energy = []
    for b in rows:
        total, of_row = 0.0, {}
        for t in range(length[b]):
            own = 1 - 2 * float(inputs.logprobs_BR[b, t].exp()) + float(inputs.collisions_BR[b, t])
            total += own * (1.0 if inputs.weights_BR is None else float(inputs.weights_BR[b, t]) ** 2)
            of_row[t] = total
        energy.append(of_row)
    advantages = [[0.0] * inputs.rewards_BR.shape[1] for _ in rows]
    for b in rows:
        others = [i for i in rows if group[i] == group[b] and i != b]
        last = max((length[i] - 1 for i in others), default=-1)
        for t in range(length[b]):
            there = [i for i in [b, *others] if t < length[i]]
            weight = sum(energy[i][t] for i in there)
            shares = [energy[i][t] / weight if weight > 0 else 1 / len(there) for i in there]
            baseline = sum(to_go[i][t] * share for i, share in zip(there, shares, strict=True))
            advantages[b][t] = to_go[b][t] - (0.0 if zero_tail and t > last else baseline)
    return advantages


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=3), st.integers(0, 99))
def test_the_optimal_token_baseline_line_by_line(name, lengths_of_groups, seed):
    inputs = random_inputs(lengths_of_groups, seed)
    if seed % 3:
        generator = torch.Generator().manual_seed(seed)
        shape = inputs.rewards_BR.shape
        weights_BR = torch.rand(shape, generator=generator, dtype=torch.float64)
        inputs = replace(inputs, weights_BR=weights_BR)
    zero_tail = seed % 2 == 0
    got_BR, _ = ESTIMATORS[name].estimate(inputs, how_of(name, otb_zero_tail=zero_tail))
    want = otb_line_by_line(inputs, zero_tail)
    torch.testing.assert_close(got_BR, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_a_policy_without_probabilities_is_said():
    inputs = AdvantageInputs(torch.ones(1, 1), torch.ones(1).long(), torch.zeros(1))
    with pytest.raises(AssertionError, match="the policy's probabilities"):
        ESTIMATORS["optimal_token_baseline"].estimate(inputs, how_of("optimal_token_baseline"))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"otb_zero_tail": False, "advantage": "opo"},
            "--otb_zero_tail False applies only to --advantage optimal_token_baseline",
        ),
        ({"cov_share": 0.0, "policy_loss": "kl_cov"}, "--cov_share expects more than 0 and less than 1, got 0.0"),
        ({"cov_share": 0.1}, "--cov_share 0.1 applies only to --policy_loss kl_cov or clip_cov, not to ppo; remove it"),
        ({"sapo_tau_neg": 2.0}, "--sapo_tau_neg 2.0 applies only to --policy_loss sapo, not to ppo; remove it"),
        ({"sapo_tau_pos": 0.0, "policy_loss": "sapo"}, "--sapo_tau_pos expects more than 0, got 0.0"),
        (
            {"policy_loss": "sapo", "clip_range": 0.2},
            "--clip_range 0.2 has no effect with --policy_loss sapo; remove it",
        ),
        (
            {"policy_loss": "geo_mean", "dual_clip": 3.0},
            "--dual_clip 3.0 has no effect with --policy_loss geo_mean; rem",
        ),
    ],
)
def test_flags_of_another_loss_or_estimator(given, sentence):
    [found] = mistakes_of(AlgorithmArguments(**given))
    assert found.startswith(sentence)


def test_the_bounds_of_clip_cov():
    mistakes = Mistakes()
    check(SimpleNamespace(settings={"clip_cov_low": 6.0, "clip_cov_high": 5.0}), mistakes)
    assert mistakes.sentences == ["--clip_cov_low must be below --clip_cov_high 5.0, got 6.0; lower it"]
    check(SimpleNamespace(settings={}), mistakes)
    check(SimpleNamespace(settings={"clip_cov_low": 1.0, "clip_cov_high": 5.0}), mistakes)
    assert len(mistakes.sentences) == 1
