"""Estimators that compare the samples of a prompt: a table worked by hand, and their written formulas."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.estimator_inputs import (
    HOW,
    ROOT3,
    WITHOUT_STD,
    check_formula,
    random_inputs,
    spread,
    table_inputs,
)
from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.advantages.inputs import AdvantageInputs

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


FORMULAS = {
    "grpo_passk": spread(_passk),
    "opo": spread(lambda R, L, i, **_: R[i] - sum(a * b for a, b in zip(L, R, strict=True)) / sum(L)),  # noqa: N803
    "gpg": spread(lambda R, L, i, alpha, **_: alpha * (R[i] - statistics.fmean(R))),  # noqa: N803
}


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=4), st.integers(0, 99))
def test_the_written_formula_on_ragged_groups(name, lengths_of_groups, seed):
    check_formula(name, FORMULAS[name], random_inputs(lengths_of_groups, seed))
