"""Every estimator against a table worked by hand, its written formula, and what must not change it; GAE; whitening; the
rewards that estimators read."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support import plain_losses
from tests.support.estimator_inputs import (
    HOW,
    ROOT3,
    WITHOUT_STD,
    check_formula,
    how_of,
    random_inputs,
    reordered,
    spread,
    table_inputs,
    vars_of,
)
from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.advantages.estimators import gae as estimate
from training.step3_ppo.advantages.estimators import moments, whiten
from training.step3_ppo.advantages.inputs import (
    AdvantageInputs,
    AdvantageSettings,
    group_centred,
    missing_eos_punishment,
    overlong_punishment,
    settled,
    shaped_rewards,
)

# Group 7: outcomes R = 1, 4, 1, lengths 1, 3, 2; mean 2, deviations -1, 2, -1, std = sqrt((1 + 4 + 1) / 2) = sqrt 3.
TABLE = {
    # (R - mean) / std
    "grpo": [[-1 / ROOT3, 0, 0], [2 / ROOT3] * 3, [-1 / ROOT3] * 2 + [0], [0, 0, 0]],
    # R - mean of the other two: 1 - 2.5, 4 - 1, 1 - 2.5
    "rloo": [[-1.5, 0, 0], [3, 3, 3], [-1.5, -1.5, 0], [0, 0, 0]],
    # G_t with gamma 0.9: 1; 3, 1 + 2.7 = 3.7, 0 + 3.33; 2, -1 + 1.8; 2, 0.5 + 1.8
    "reinforce++": [[1, 0, 0], [3.33, 3.7, 3], [0.8, 2, 0], [2.3, 2, 0]],
    # R - mean
    "reinforce++_baseline": [[-1, 0, 0], [2, 2, 2], [-1, -1, 0], [0, 0, 0]],
    # G_t with gamma 1, minus the greedy score 2 (1 for the second prompt): 1; 4, 4, 3; 1, 2; 2.5, 2
    "remax": [[-1, 0, 0], [2, 2, 1], [-1, 0, 0], [1.5, 1, 0]],
}
TABLE["none"] = [[0, 0, 0]] * 4


@pytest.mark.parametrize("name", TABLE)
def test_the_table_worked_by_hand(name):
    advantages_BR, returns_BR = ESTIMATORS[name].estimate(table_inputs(), HOW)
    torch.testing.assert_close(advantages_BR, torch.tensor(TABLE[name], dtype=torch.float32), rtol=1e-5, atol=1e-6)
    assert returns_BR is None


def test_without_the_standard_deviation():
    advantages_BR, _ = ESTIMATORS["grpo"].estimate(table_inputs(), WITHOUT_STD)
    assert advantages_BR.tolist() == [[-1, 0, 0], [2, 2, 2], [-1, -1, 0], [0, 0, 0]]  # R - mean


def test_deviations_of_the_group_and_of_the_batch():
    """Outcomes 1, 4, 1 and 2.5, 0.5 of two prompts: means 2 and 1.5, deviations sqrt 3 and sqrt 2. Over all five, with
    mean 1.8, the variance is (0.64 + 4.84 + 0.64 + 0.49 + 1.69) / 4 = 2.075. rloo's advantages are -1.5, 3, -1.5 and
    2, -2, whose mean is 0 and variance (2.25 + 9 + 2.25 + 4 + 4) / 4 = 5.375."""
    inputs = AdvantageInputs(
        torch.tensor([[1.0], [4.0], [1.0], [2.5], [0.5]]), torch.ones(5).long(), torch.tensor([0, 0, 0, 1, 1])
    )
    by_group = torch.tensor([-1 / ROOT3, 2 / ROOT3, -1 / ROOT3, 2**-0.5, -(2**-0.5)])
    by_batch = torch.tensor([-1.0, 2.0, -1.0, 1.0, -1.0]) / 2.075**0.5
    left_out = torch.tensor([-1.5, 3.0, -1.5, 2.0, -2.0])
    spread = torch.tensor([1.5 * ROOT3, 1.5 * ROOT3, 1.5 * ROOT3, 8**0.5, 8**0.5])
    for name, over, want in (
        ("grpo", None, by_group),
        ("grpo", "group", by_group),
        ("grpo", "batch", by_batch),
        ("rloo", None, left_out),
        ("rloo", "group", left_out / spread),
        ("rloo", "batch", left_out / 5.375**0.5),
    ):
        got_BR, _ = ESTIMATORS[name].estimate(inputs, replace(HOW, norm_over=over))
        torch.testing.assert_close(got_BR[:, 0], want, rtol=1e-5, atol=1e-5)
        plain_BR, _ = ESTIMATORS[name].estimate(inputs, replace(WITHOUT_STD, norm_over=over))
        assert torch.equal(plain_BR, ESTIMATORS[name].estimate(inputs, WITHOUT_STD)[0])


# --- the written formulas, one sequence at a time. r: rewards of the response, R: outcomes of its whole group with its
# own at index i, L: their lengths.


def _grpo(R, L, i, **_):  # noqa: N803
    return 0.0 if len(R) == 1 else (R[i] - statistics.fmean(R)) / (statistics.stdev(R) + 1e-6)


def _rloo(R, L, i, **_):  # noqa: N803
    return 0.0 if len(R) == 1 else R[i] - statistics.fmean(R[:i] + R[i + 1 :])


def to_go(r: list[float], gamma: float) -> list[float]:
    return plain_losses.to_go(torch.tensor(r, dtype=torch.float64), gamma).tolist()


FORMULAS = {
    "grpo": spread(_grpo),
    "rloo": spread(_rloo),
    "reinforce++": lambda r, R, L, i, **_: to_go(r, 0.9),  # noqa: N803
    "reinforce++_baseline": spread(lambda R, L, i, **_: R[i] - statistics.fmean(R)),  # noqa: N803
    "remax": lambda r, R, L, i, greedy, **_: [g - greedy for g in to_go(r, 1.0)],  # noqa: N803
}

groups = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4)


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=25, deadline=None)
@given(groups, st.integers(0, 99))
def test_the_written_formula_on_ragged_groups(name, lengths_of_groups, seed):
    check_formula(name, FORMULAS[name], random_inputs(lengths_of_groups, seed))


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how_of(name)) for name in ESTIMATORS]
    + [(name, replace(HOW, norm_over="batch")) for name in ("grpo", "rloo")],
)
@settings(max_examples=15, deadline=None)
@given(groups, st.integers(0, 99), st.integers(1, 3))
@example([[2, 3], [4], [1, 2, 2]], 1, 2)  # one rank has groups that teach alone, the other a group of one
def test_padding_order_and_ranks_change_nothing(name, how, lengths_of_groups, seed, ranks):
    estimate = ESTIMATORS[name].estimate
    inputs = random_inputs(lengths_of_groups, seed)
    want_BR, _ = estimate(inputs, how)
    wider_BR, _ = estimate(random_inputs(lengths_of_groups, seed, extra_columns=3), how)
    torch.testing.assert_close(wider_BR[:, :6], want_BR)
    assert not wider_BR[:, 6:].any()
    order = torch.randperm(len(want_BR), generator=torch.Generator().manual_seed(seed))
    got_BR, _ = estimate(reordered(inputs, order), how)
    torch.testing.assert_close(got_BR, want_BR[order])

    # Groups dealt over ranks; what an estimator adds up over ranks is added up by hand (a first pass collects it).
    shares = [torch.nonzero(inputs.group_B % ranks == rank).flatten() for rank in range(ranks)]
    told: list[torch.Tensor] = []
    for share in filter(len, shares):
        part = reordered(inputs, share)
        estimate(AdvantageInputs(**{**vars_of(part), "over_ranks": lambda own: told.append(own) or own}), how)
    for share in filter(len, shares):
        part = reordered(inputs, share)
        got_BR, _ = estimate(AdvantageInputs(**{**vars_of(part), "over_ranks": lambda own: sum(told)}), how)
        torch.testing.assert_close(got_BR, want_BR[share])


@pytest.mark.parametrize("name", [name for name, estimator in ESTIMATORS.items() if estimator.needs_groups])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_equal_scores_teach_exactly_nothing(name, size):
    """Seven scores of 1.3 in float32 have a mean of 1.2999999: over their standard deviation that becomes 0.1."""
    rewards_BR = torch.zeros(size, 4)
    rewards_BR[:, 0] = 1.3
    policy = {"logprobs_BR": torch.full((size, 4), 0.3).log(), "collisions_BR": torch.full((size, 4), 0.4)}
    inputs = AdvantageInputs(rewards_BR, torch.arange(size) % 4 + 1, torch.zeros(size, dtype=torch.int64), **policy)
    for how in (HOW, WITHOUT_STD, replace(HOW, norm_over="batch")):
        # A response alone is all tail.
        own = {"otb_zero_tail": False} if name.endswith("optimal_token_baseline") and size == 1 else {}
        advantages_BR, _ = ESTIMATORS[name].estimate(inputs, how_of(name, how, **own))
        assert not advantages_BR.any() and advantages_BR.dtype == torch.float32


def test_arguments_keep_their_values():
    inputs = random_inputs([[2, 3], [4]], 1)
    before = {name: value.clone() for name, value in vars_of(inputs).items()}
    for name, estimator in ESTIMATORS.items():
        estimator.estimate(inputs, how_of(name))
    assert all(torch.equal(vars_of(inputs)[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("gae", "the critic's values"),
        ("remax", "scores of greedy responses"),
    ],
)
def test_what_is_missing_is_said(name, needs):
    with pytest.raises(AssertionError, match=needs):
        ESTIMATORS[name].estimate(AdvantageInputs(torch.ones(1, 1), torch.ones(1).long(), torch.zeros(1)), HOW)


# --- rounding


def test_outcomes_that_are_alike_are_one_number():
    """Groups in any order; what is not finite stays. The mean of equal numbers is exact."""
    near = 1.0 + 0.9e-5
    values_B = torch.tensor([1.0, 2e5, near, 2e5 + 3, torch.inf, torch.inf, 0.0, 9e-6, 3.0], dtype=torch.float64)
    group_B = torch.tensor([4, 1, 4, 1, 0, 0, 3, 3, 2])
    want = [near, 2e5, near, 2e5 + 3, torch.inf, torch.inf, 9e-6, 9e-6, 3.0]
    assert settled(values_B, group_B).tolist() == want
    third = torch.tensor([1 / 3, 1 / 3 + 1e-16, 1 / 3], dtype=torch.float64)
    found = settled(third, torch.zeros(3, dtype=torch.int64))
    assert not group_centred(found, torch.zeros(3, dtype=torch.int64)).any()


def test_scores_of_two_layouts_of_one_text_teach_nothing():
    """They differ in their last bits: the group's deviation is of that size, and would make advantages near 1."""
    for rewards in ([[0.1, 0.2], [0.0, 0.3]], [[0.0, 7.0], [0.0, 7.0 + 4e-6]]):
        inputs = AdvantageInputs(torch.tensor(rewards), torch.tensor([2, 2]), torch.tensor([0, 0]))
        assert not ESTIMATORS["grpo"].estimate(inputs, HOW)[0].any()
    inputs = AdvantageInputs(torch.tensor([[0.0, 7.0], [0.0, 7.001]]), torch.tensor([2, 2]), torch.tensor([0, 0]))
    assert ESTIMATORS["grpo"].estimate(inputs, HOW)[0].all()


@pytest.mark.parametrize("name", [name for name, each in ESTIMATORS.items() if each.needs_groups])
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 99), st.booleans())
def test_a_group_of_equal_responses_has_no_advantage(name, seed, is_sure):
    """Exactly none, also where every token of it has all probability."""
    inputs = random_inputs([[3, 3, 3], [2, 1, 4]], seed)
    rewards_BR = inputs.rewards_BR.clone()
    rewards_BR[:3] = rewards_BR[0]
    inputs = replace(inputs, rewards_BR=rewards_BR)
    if is_sure:
        certain = {"logprobs_BR": torch.zeros_like(rewards_BR), "collisions_BR": torch.ones_like(rewards_BR)}
        inputs = replace(inputs, **certain)
    for how in (HOW, WITHOUT_STD, replace(HOW, norm_over="batch")):
        advantages_BR, _ = ESTIMATORS[name].estimate(inputs, how_of(name, how))
        assert not advantages_BR[:3].any()
        assert advantages_BR[3:].any()


def gae(rewards_BR, values_BR, lengths_B, gamma: float, lam: float):
    group_B = torch.arange(len(lengths_B))
    return estimate(AdvantageInputs(rewards_BR, lengths_B, group_B, values_BR), AdvantageSettings(gamma, lam, True))


def test_gae_worked_by_hand():
    # gamma 0.9, lambda 0.5, gamma lambda 0.45; the value after the last token is 0.
    #   t   r     V    V'    delta = r + 0.9 V' - V          A = delta + 0.45 A'            return = A + V
    #   3   1.0  0.2   0      1.0 + 0    - 0.2 =  0.80       0.80                            1.0
    #   2   0.3  0.6  0.2     0.3 + 0.18 - 0.6 = -0.12      -0.12 + 0.360  =  0.2400         0.84
    #   1  -0.2  0.4  0.6    -0.2 + 0.54 - 0.4 = -0.06      -0.06 + 0.108  =  0.0480         0.448
    #   0   0.1  0.5  0.4     0.1 + 0.36 - 0.5 = -0.04      -0.04 + 0.0216 = -0.0184         0.4816
    # The second response has the same numbers and ends after two tokens:
    #   1  -0.2  0.4   0     -0.2 + 0    - 0.4 = -0.60      -0.60                           -0.2
    #   0   0.1  0.5  0.4                        -0.04      -0.04 - 0.27   = -0.31           0.19
    rewards_BR = torch.tensor([[0.1, -0.2, 0.3, 1.0]] * 2)
    values_BR = torch.tensor([[0.5, 0.4, 0.6, 0.2]] * 2)
    advantages_BR, returns_BR = gae(rewards_BR, values_BR, torch.tensor([4, 2]), gamma=0.9, lam=0.5)
    torch.testing.assert_close(
        advantages_BR, torch.tensor([[-0.0184, 0.048, 0.24, 0.8], [-0.31, -0.6, 0.0, 0.0]]), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(
        returns_BR, torch.tensor([[0.4816, 0.448, 0.84, 1.0], [0.19, -0.2, 0.0, 0.0]]), rtol=0, atol=1e-6
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 1), st.integers(0, 999))
def test_gae_is_its_definition(lengths, gamma, lam, seed):
    """By the oracle in float64, one response at a time, for responses of any lengths."""
    generator = torch.Generator().manual_seed(seed)
    rewards_BR, values_BR = torch.randn(2, len(lengths), max(lengths), generator=generator, dtype=torch.float64)
    advantages_BR, returns_BR = gae(rewards_BR, values_BR, torch.tensor(lengths), gamma, lam)
    for row, length in enumerate(lengths):
        want_r = plain_losses.gae(rewards_BR[row, :length], values_BR[row, :length], gamma, lam)
        torch.testing.assert_close(advantages_BR[row, :length], want_r, rtol=0, atol=1e-9)
        torch.testing.assert_close(returns_BR[row, :length], want_r + values_BR[row, :length], rtol=0, atol=1e-9)
        assert not advantages_BR[row, length:].any() and not returns_BR[row, length:].any()


def test_two_ranks_are_whitened_as_one():
    generator = torch.Generator().manual_seed(0)
    ranks = []
    for mean, lengths in ((3.0, [4, 1, 7]), (-1.0, [5])):
        advantages = torch.randn(len(lengths), 8, generator=generator) + mean
        inside = torch.arange(8) < torch.tensor(lengths)[:, None]
        ranks.append((advantages, inside))
    total = sum(moments(*rank) for rank in ranks)
    white = [whiten(*rank, total) for rank in ranks]
    union = torch.cat([result[inside] for result, (_, inside) in zip(white, ranks, strict=True)])
    assert union.mean().item() == pytest.approx(0, abs=1e-6)
    assert union.var(unbiased=True).item() == pytest.approx(1, abs=1e-5)
    for result, (_, inside) in zip(white, ranks, strict=True):
        assert not result[~inside].any()
    # Whitened alone, each rank would have lost what sets it apart from the other.
    assert white[0][ranks[0][1]].mean() > 0.2 > -0.2 > white[1][ranks[1][1]].mean()


def test_whitening_by_hand():
    # 1, 3, 5 (and 100 outside): mean 3, variance 8 / 2 = 4.
    advantages, inside = torch.tensor([[1.0, 3.0], [5.0, 100.0]]), torch.tensor([[True, True], [True, False]])
    assert moments(advantages, inside).tolist() == [3.0, 9.0, 35.0]
    torch.testing.assert_close(
        whiten(advantages, inside, moments(advantages, inside)), torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
    )


@pytest.mark.parametrize("values", [[7.0], [0.1, 0.1, 0.1], [1e4, 1e4]], ids=["one", "equal", "large"])
def test_one_token_and_equal_tokens_become_zero(values):
    advantages = torch.tensor([values])
    inside = torch.ones_like(advantages, dtype=torch.bool)
    torch.testing.assert_close(
        whiten(advantages, inside, moments(advantages, inside)), torch.zeros_like(advantages), rtol=0, atol=1e-3
    )


def test_a_rank_without_tokens():
    advantages, nothing = torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool)
    assert moments(advantages, nothing).tolist() == [0.0, 0.0, 0.0]
    assert whiten(advantages, nothing, torch.tensor([3.0, 9.0, 35.0])).tolist() == [[0.0, 0.0]]
    assert whiten(advantages, nothing, torch.zeros(3)).tolist() == [[0.0, 0.0]]


def test_large_means_keep_their_spread():
    """Float32 sums of squares would lose a spread of 1 around 10,000."""
    advantages = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)) + 1e4
    inside = torch.ones_like(advantages, dtype=torch.bool)
    white = whiten(advantages, inside, moments(advantages, inside))
    assert white.std().item() == pytest.approx(1, abs=1e-3)
    assert white.mean().item() == pytest.approx(0, abs=1e-3)


def test_what_differs_by_rounding_alone_is_not_blown_up():
    """Rewards that are all 0 but for the KL of a policy that still is its reference."""
    inside = torch.ones(2, 3, dtype=torch.bool)
    noise = torch.tensor([[1e-8, -2e-8, 0.0], [3e-8, 1e-8, -1e-8]])
    assert not whiten(noise, inside, moments(noise, inside)).any()
    small = 1e3 * noise
    assert whiten(small, inside, moments(small, inside)).all()


def test_shaped_rewards_by_hand():
    # Lengths 2 and 3 of R = 3, KL coefficient 0.1.
    kl_BR = torch.tensor([[1.0, 2.0, 99.0], [-1.0, 0.5, 3.0]])  # what is outside the response is not read
    rewards_BR = shaped_rewards(torch.tensor([1.5, -2.0]), kl_BR, torch.tensor([2, 3]), kl_coef=0.1)
    torch.testing.assert_close(rewards_BR, torch.tensor([[-0.1, 1.3, 0.0], [0.1, -0.05, -2.3]]))


def test_the_position_comes_from_lengths_so_an_end_token_that_is_also_pad_gets_the_score():
    """DeepSpeed-Chat counts ids != pad: with pad == eos it puts the reward where the loss is masked."""
    eos = pad = 2
    response_ids_BR = torch.tensor([[7, 8, eos, pad, pad], [eos, pad, pad, pad, pad], [7, 8, 9, 7, 8]])
    lengths_B = torch.tensor([3, 1, 5])
    rewards_BR = shaped_rewards(torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3, 5), lengths_B, 0.1)
    assert rewards_BR.nonzero().tolist() == [[0, 2], [1, 0], [2, 4]]
    assert response_ids_BR[0, 2] == response_ids_BR[1, 0] == eos
    assert rewards_BR.sum(1).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_what_is_outside_may_be_anything(kl_coef):
    kl_BR = torch.tensor([[1.0, float("nan")], [1.0, float("inf")]])
    rewards_BR = shaped_rewards(torch.ones(2), kl_BR, torch.tensor([1, 1]), kl_coef)
    torch.testing.assert_close(rewards_BR, torch.tensor([[1.0 - kl_coef, 0.0]] * 2))


def test_a_missing_end_by_hand():
    assert missing_eos_punishment(torch.tensor([True, False]), 1.5).tolist() == [0.0, -1.5]


def test_the_soft_overlong_punishment_by_hand():
    # At most 20 tokens, the last 8 of them a buffer: free up to 12, then 1/8 a token.
    lengths_B = torch.tensor([1, 12, 13, 16, 19, 20, 25])
    want = [0.0, 0.0, -1 / 8, -4 / 8, -7 / 8, -1.0, -1.0]
    assert overlong_punishment(lengths_B, max_tokens=20, buffer_tokens=8).tolist() == want
    assert overlong_punishment(lengths_B, max_tokens=20, buffer_tokens=0).tolist() == [0.0] * 7
