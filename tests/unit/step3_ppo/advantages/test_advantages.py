"""Every estimator against a table worked by hand, its written formula, and what must not change it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings, group_centred, settled

HOW = AdvantageSettings(gamma=0.9, lam=0.7, norm_by_std=True)
WITHOUT_STD = AdvantageSettings(gamma=0.9, lam=0.7, norm_by_std=False)


def table_inputs() -> AdvantageInputs:
    """Two prompts. The first has responses of 1, 3 and 2 tokens whose rewards sum to 1, 4 and 1; the second has one
    of 2 tokens whose rewards are 0.5 and 2. What stands outside a response is not read."""
    nan = float("nan")
    return AdvantageInputs(
        rewards_BR=torch.tensor([[1.0, nan, 9.0], [0.0, 1.0, 3.0], [-1.0, 2.0, nan], [0.5, 2.0, 9.0]]),
        response_lengths_B=torch.tensor([1, 3, 2, 2]),
        group_B=torch.tensor([7, 7, 7, 3]),
        values_BR=torch.zeros(4, 3),
        greedy_scores_B=torch.tensor([2.0, 2.0, 2.0, 1.0]),
        logprobs_BR=torch.tensor([[0.5, nan, nan], [0.5, 0.5, 0.25], [0.25, 0.5, nan], [0.5, 0.5, nan]]).log(),
        collisions_BR=torch.tensor([[0.5, nan, nan], [0.5, 0.5, 0.5], [0.5, 0.5, nan], [0.5, 0.5, nan]]),
    )


# Group 7: outcomes R = 1, 4, 1, lengths 1, 3, 2; mean 2, deviations -1, 2, -1, std = sqrt((1 + 4 + 1) / 2) = sqrt 3.
ROOT3 = 3.0**0.5
TABLE = {
    # (R - mean) / std
    "grpo": [[-1 / ROOT3, 0, 0], [2 / ROOT3] * 3, [-1 / ROOT3] * 2 + [0], [0, 0, 0]],
    # best - second = 4 - 1 = 3, over std
    "grpo_passk": [[0, 0, 0], [3 / ROOT3] * 3, [0, 0, 0], [0, 0, 0]],
    # R - mean of the other two: 1 - 2.5, 4 - 1, 1 - 2.5
    "rloo": [[-1.5, 0, 0], [3, 3, 3], [-1.5, -1.5, 0], [0, 0, 0]],
    # G_t with gamma 0.9: 1; 3, 1 + 2.7 = 3.7, 0 + 3.33; 2, -1 + 1.8; 2, 0.5 + 1.8
    "reinforce++": [[1, 0, 0], [3.33, 3.7, 3], [0.8, 2, 0], [2.3, 2, 0]],
    # R - mean
    "reinforce++_baseline": [[-1, 0, 0], [2, 2, 2], [-1, -1, 0], [0, 0, 0]],
    # G_t with gamma 1, minus the greedy score 2 (1 for the second prompt): 1; 4, 4, 3; 1, 2; 2.5, 2
    "remax": [[-1, 0, 0], [2, 2, 1], [-1, 0, 0], [1.5, 1, 0]],
    # baseline (1 x 1 + 3 x 4 + 2 x 1) / 6 = 2.5
    "opo": [[-1.5, 0, 0], [1.5, 1.5, 1.5], [-1.5, -1.5, 0], [0, 0, 0]],
    # R - mean, times alpha = 4 sequences / 3 that are in a group with different outcomes
    "gpg": [[-4 / 3, 0, 0], [8 / 3] * 3, [-4 / 3, -4 / 3, 0], [0, 0, 0]],
    # G_t with gamma 1: 1; 4, 4, 3; 1, 2.  w = 1 - 2 p + sum p^2: 0.5; 0.5, 0.5, 1; 1, 0.5,  W: 0.5; 0.5, 1, 2; 1, 1.5.
    #   t = 0  B = (1 x 0.5 + 4 x 0.5 + 1 x 1) / 2 = 1.75
    #   t = 1  B = (4 x 1 + 2 x 1.5) / 2.5 = 2.8
    #   t = 2  the second response alone: B = 0, as for all of the second prompt's, whose G is 2.5, 2
    "optimal_token_baseline": [[-0.75, 0, 0], [2.25, 1.2, 3], [-0.75, -0.8, 0], [2.5, 2, 0]],
}
TABLE["none"] = [[0, 0, 0]] * 4
TABLE["tir_optimal_token_baseline"] = TABLE["optimal_token_baseline"]  # nothing is inserted


@pytest.mark.parametrize("name", TABLE)
def test_the_table_worked_by_hand(name):
    advantages_BR, returns_BR = ESTIMATORS[name].estimate(table_inputs(), HOW)
    torch.testing.assert_close(advantages_BR, torch.tensor(TABLE[name], dtype=torch.float32), rtol=1e-5, atol=1e-6)
    assert returns_BR is None


def test_without_the_standard_deviation():
    advantages_BR, _ = ESTIMATORS["grpo"].estimate(table_inputs(), WITHOUT_STD)
    assert advantages_BR.tolist() == [[-1, 0, 0], [2, 2, 2], [-1, -1, 0], [0, 0, 0]]  # R - mean
    advantages_BR, _ = ESTIMATORS["grpo_passk"].estimate(table_inputs(), WITHOUT_STD)
    assert advantages_BR.tolist() == [[0, 0, 0], [3, 3, 3], [0, 0, 0], [0, 0, 0]]  # best - second


def test_a_tail_that_learns_nothing():
    """Where only one response goes on, its own return is the baseline."""
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        advantages_BR, _ = ESTIMATORS[name].estimate(table_inputs(), replace(HOW, zero_tail=False))
        want = torch.tensor([[-0.75, 0, 0], [2.25, 1.2, 0], [-0.75, -0.8, 0], [0, 0, 0]])
        torch.testing.assert_close(advantages_BR, want, rtol=1e-5, atol=1e-6)


def test_inserted_tokens_have_no_place_of_their_own():
    """The second response's middle token was inserted: G 3, -, 3 and W 0.5, -, 1.5. The third's: G 1, 2 and W 1, 1.5.

    By columns:  t = 0  B = (1 x 0.5 + 3 x 0.5 + 1 x 1) / 2 = 1.5    t = 1  the third alone, not the longest: A = 0
                 t = 2  the second, beyond the end of all others: B = 0
    By what was drawn, its last token is compared with the third's:  B = (3 x 1.5 + 2 x 1.5) / 3 = 2.5
    """
    drawn_BR = torch.tensor([[True] * 3, [True, False, True], [True] * 3, [True] * 3])
    inputs = replace(table_inputs(), drawn_BR=drawn_BR)
    by_column, _ = ESTIMATORS["optimal_token_baseline"].estimate(inputs, HOW)
    torch.testing.assert_close(by_column[:3], torch.tensor([[-0.5, 0, 0], [1.5, 0, 3], [-0.5, 0, 0]]))
    by_drawn, _ = ESTIMATORS["tir_optimal_token_baseline"].estimate(inputs, HOW)
    torch.testing.assert_close(by_drawn[:3], torch.tensor([[-0.5, 0, 0], [1.5, 0, 0.5], [-0.5, -0.5, 0]]))


def test_weights_of_a_mismatch_weigh_the_energy_by_their_squares():
    """Weight 2 on the third response's first token: w 4, 0.5, so B_0 = (0.5 + 2 + 4) / 5 = 1.3 and, with W 4.5 there,
    B_1 = (4 x 1 + 2 x 4.5) / 5.5 = 26 / 11."""
    weights_BR = torch.ones(4, 3)
    weights_BR[2, 0] = 2.0
    got_BR, _ = ESTIMATORS["optimal_token_baseline"].estimate(replace(table_inputs(), weights_BR=weights_BR), HOW)
    want = torch.tensor([[-0.3, 0, 0], [2.7, 18 / 11, 3], [-0.3, -4 / 11, 0]])
    torch.testing.assert_close(got_BR[:3], want, rtol=1e-5, atol=1e-6)


def test_a_policy_without_a_choice_has_the_mean_as_its_baseline():
    """Probability 1: w and W are 0; B_0 = (1 + 4 + 1) / 3, B_1 = (4 + 2) / 2, and none for a response alone."""
    inputs = replace(table_inputs(), logprobs_BR=torch.zeros(4, 3), collisions_BR=torch.ones(4, 3))
    got_BR, _ = ESTIMATORS["optimal_token_baseline"].estimate(inputs, HOW)
    assert got_BR.tolist() == [[-1, 0, 0], [2, 1, 3], [-1, -1, 0], [2.5, 2, 0]]


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
        ("grpo_passk", "batch", torch.tensor([0.0, 3.0, 0.0, 2.0, 0.0]) / 2.075**0.5),
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


def _spread(value: Callable) -> Callable:
    return lambda r, R, L, i, **more: [value(R, L, i, **more)] * len(r)  # noqa: N803


def _to_go(r: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))]


def _grpo(R, L, i, **_):  # noqa: N803
    return 0.0 if len(R) == 1 else (R[i] - statistics.fmean(R)) / (statistics.stdev(R) + 1e-6)


def _passk(R, L, i, **_):  # noqa: N803
    if len(R) == 1 or R[i] < max(R):
        return 0.0
    best, second = sorted(R, reverse=True)[:2]
    return (best - second) / (statistics.stdev(R) + 1e-6)


def _rloo(R, L, i, **_):  # noqa: N803
    return 0.0 if len(R) == 1 else R[i] - statistics.fmean(R[:i] + R[i + 1 :])


FORMULAS = {
    "grpo": _spread(_grpo),
    "grpo_passk": _spread(_passk),
    "rloo": _spread(_rloo),
    "reinforce++": lambda r, R, L, i, **_: _to_go(r, 0.9),  # noqa: N803
    "reinforce++_baseline": _spread(lambda R, L, i, **_: R[i] - statistics.fmean(R)),  # noqa: N803
    "remax": lambda r, R, L, i, greedy, **_: [g - greedy for g in _to_go(r, 1.0)],  # noqa: N803
    "opo": _spread(lambda R, L, i, **_: R[i] - sum(a * b for a, b in zip(L, R, strict=True)) / sum(L)),  # noqa: N803
    "gpg": _spread(lambda R, L, i, alpha, **_: alpha * (R[i] - statistics.fmean(R))),  # noqa: N803
}

groups = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4)


def otb_line_by_line(inputs: AdvantageInputs, by_drawn: bool, zero_tail: bool) -> list[list[float]]:
    """The optimal token baseline as it is written, token by token: every sum over the group's responses in Python."""
    length, group = inputs.response_lengths_B.tolist(), inputs.group_B.tolist()
    rows = range(len(length))
    drawn = [[t for t in range(length[b]) if inputs.drawn_BR is None or inputs.drawn_BR[b, t]] for b in rows]
    to_go = [{t: sum(float(inputs.rewards_BR[b, k]) for k in drawn[b] if k >= t) for t in drawn[b]} for b in rows]
    energy = []
    for b in rows:
        total, of_row = 0.0, {}
        for t in drawn[b]:
            own = 1 - 2 * float(inputs.logprobs_BR[b, t].exp()) + float(inputs.collisions_BR[b, t])
            total += own * (1.0 if inputs.weights_BR is None else float(inputs.weights_BR[b, t]) ** 2)
            of_row[t] = total
        energy.append(of_row)
    place = [{(number if by_drawn else t): t for number, t in enumerate(drawn[b])} for b in rows]
    advantages = [[0.0] * inputs.rewards_BR.shape[1] for _ in rows]
    for b in rows:
        others = [i for i in rows if group[i] == group[b] and i != b]
        last = max((max(place[i], default=-1) for i in others), default=-1)
        for where, t in place[b].items():
            there = [(i, place[i][where]) for i in [b, *others] if where in place[i]]
            weight = sum(energy[i][k] for i, k in there)
            shares = [energy[i][k] / weight if weight > 0 else 1 / len(there) for i, k in there]
            baseline = sum(to_go[i][k] * share for (i, k), share in zip(there, shares, strict=True))
            advantages[b][t] = to_go[b][t] - (0.0 if zero_tail and where > last else baseline)
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
        inputs = replace(inputs, weights_BR=weights_BR, drawn_BR=torch.rand(shape, generator=generator) < 0.7)
    zero_tail = seed % 2 == 0
    got_BR, _ = ESTIMATORS[name].estimate(inputs, replace(HOW, zero_tail=zero_tail))
    want = otb_line_by_line(inputs, name.startswith("tir"), zero_tail)
    torch.testing.assert_close(got_BR, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def random_inputs(lengths_of_groups: list[list[int]], seed: int, extra_columns: int = 0) -> AdvantageInputs:
    """float64, groups numbered from 10 down; one group of two or more has equal outcomes where the seed is even."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [length for group in lengths_of_groups for length in group]
    rewards_BR = torch.randn(len(lengths), 6, generator=generator, dtype=torch.float64)
    values_BR = torch.randn(len(lengths), 6, generator=generator, dtype=torch.float64)
    group_B = torch.tensor([10 - g for g, group in enumerate(lengths_of_groups) for _ in group])
    if seed % 2 == 0:
        rewards_BR[group_B == 10] = 0.0
        rewards_BR[group_B == 10, 0] = 1.3
    greedy = torch.randn(len(lengths_of_groups), generator=generator, dtype=torch.float64)
    probabilities_BRV = torch.rand(len(lengths), 6, 5, generator=generator, dtype=torch.float64).softmax(-1)
    chosen_BR = probabilities_BRV[..., 0]
    junk_BR = torch.full((len(lengths), extra_columns), float("nan"), dtype=torch.float64)
    return AdvantageInputs(
        rewards_BR=torch.cat([rewards_BR, junk_BR], dim=1),
        response_lengths_B=torch.tensor(lengths),
        group_B=group_B,
        values_BR=torch.cat([values_BR, junk_BR], dim=1),
        greedy_scores_B=greedy[10 - group_B],
        logprobs_BR=torch.cat([chosen_BR.log(), junk_BR], dim=1),
        collisions_BR=torch.cat([probabilities_BRV.square().sum(-1), junk_BR], dim=1),
    )


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=25, deadline=None)
@given(groups, st.integers(0, 99))
def test_the_written_formula_on_ragged_groups(name, lengths_of_groups, seed):
    inputs = random_inputs(lengths_of_groups, seed)
    got_BR, _ = ESTIMATORS[name].estimate(inputs, HOW)
    lengths = inputs.response_lengths_B.tolist()
    rewards = [row[:length] for row, length in zip(inputs.rewards_BR.tolist(), lengths, strict=True)]
    outcomes = [sum(row) for row in rewards]
    members = [[j for j, g in enumerate(inputs.group_B) if g == group] for group in inputs.group_B]
    teaching = sum(len({outcomes[j] for j in own}) > 1 for own in members)
    for b, own in enumerate(members):
        want = FORMULAS[name](
            rewards[b],
            [outcomes[j] for j in own],
            [lengths[j] for j in own],
            own.index(b),
            greedy=float(inputs.greedy_scores_B[b]),
            alpha=len(lengths) / max(teaching, 1),
        )
        assert got_BR[b].tolist() == pytest.approx(want + [0.0] * (6 - lengths[b]), rel=1e-8, abs=1e-8)


def reordered(inputs: AdvantageInputs, order: torch.Tensor) -> AdvantageInputs:
    return AdvantageInputs(
        inputs.rewards_BR[order],
        inputs.response_lengths_B[order],
        inputs.group_B[order],
        inputs.values_BR[order],
        inputs.greedy_scores_B[order],
        inputs.logprobs_BR[order],
        inputs.collisions_BR[order],
        over_ranks=inputs.over_ranks,
    )


@pytest.mark.parametrize(
    ("name", "how"),
    [*((name, HOW) for name in ESTIMATORS), *((name, replace(HOW, norm_over="batch")) for name in ("grpo", "rloo"))],
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


def vars_of(inputs: AdvantageInputs) -> dict:
    names = ("rewards_BR", "response_lengths_B", "group_B", "values_BR", "greedy_scores_B", "logprobs_BR")
    names = (*names, "collisions_BR")
    return {name: getattr(inputs, name) for name in names}


@pytest.mark.parametrize("name", [name for name, estimator in ESTIMATORS.items() if estimator.needs_groups])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_equal_scores_teach_exactly_nothing(name, size):
    """Seven scores of 1.3 in float32 have a mean of 1.2999999: over their standard deviation that becomes 0.1."""
    rewards_BR = torch.zeros(size, 4)
    rewards_BR[:, 0] = 1.3
    policy = {"logprobs_BR": torch.full((size, 4), 0.3).log(), "collisions_BR": torch.full((size, 4), 0.4)}
    inputs = AdvantageInputs(rewards_BR, torch.arange(size) % 4 + 1, torch.zeros(size, dtype=torch.int64), **policy)
    for how in (HOW, WITHOUT_STD, replace(HOW, norm_over="batch")):
        if name.endswith("optimal_token_baseline") and size == 1:  # all of it is tail
            how = replace(how, zero_tail=False)
        advantages_BR, _ = ESTIMATORS[name].estimate(inputs, how)
        assert not advantages_BR.any() and advantages_BR.dtype == torch.float32


def test_arguments_keep_their_values():
    inputs = random_inputs([[2, 3], [4]], 1)
    before = {name: value.clone() for name, value in vars_of(inputs).items()}
    for estimator in ESTIMATORS.values():
        estimator.estimate(inputs, HOW)
    assert all(torch.equal(vars_of(inputs)[name], value) for name, value in before.items())


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("gae", "the critic's values"),
        ("remax", "scores of greedy responses"),
        ("optimal_token_baseline", "the policy's probabilities"),
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
    for how in (HOW, WITHOUT_STD, replace(HOW, norm_over="batch"), replace(HOW, zero_tail=False)):
        advantages_BR, _ = ESTIMATORS[name].estimate(inputs, how)
        assert not advantages_BR[:3].any()
        assert advantages_BR[3:].any()
