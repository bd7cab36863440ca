"""The optimal token baseline: a table worked by hand, and the paper's sums line by line."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.estimator_inputs import how_of, random_inputs, table_inputs
from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.advantages.inputs import AdvantageInputs


def test_the_table_worked_by_hand():
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
