"""From the flags to the terms of the sum, and to beta of each step."""

from __future__ import annotations

import math

import pytest

from training.step2_dpo.arguments import DpoArguments, objectives_of, schedule_of, weighted_names
from training.step2_dpo.loss import LOSSES, BetaSchedule, at_beta
from training.utils.base.errors import ThreestepError


@pytest.mark.needs_plugin("objectives")
def test_losses_and_weights():
    assert weighted_names("ipo") == {"ipo": 1.0}
    assert weighted_names("sigmoid:0.8, sft:.2,orpo:1e-1") == {"sigmoid": 0.8, "sft": 0.2, "orpo": 0.1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "--loss_type expects one of .*, got ''"),
        ("sigmoid,", "--loss_type expects one of .*, got ''"),
        ("sigmoid:0.8,hing", "got 'hing'; did you mean 'hinge'"),
        ("sigmoid:0", "--loss_type expects a weight above 0 behind 'sigmoid:', got '0' in 'sigmoid:0'"),
        ("sigmoid:nan", "got 'nan'"),
        ("sigmoid:", "got '' in 'sigmoid:'"),
    ],
)
def test_mistakes(text, said):
    with pytest.raises(ThreestepError, match=said):
        weighted_names(text)


@pytest.mark.needs_plugin("objectives")
def test_the_terms():
    flags = DpoArguments(
        loss_type="sigmoid:0.8,simpo:0.2", beta=0.3, sft_coef=0.5, simpo_gamma=1.0, label_smoothing=0.1
    )
    first, second, third = objectives_of(flags)
    assert [one.name for one in (first, second, third)] == ["sigmoid", "simpo", "sft"]
    assert [one.weight for one in (first, second, third)] == [0.8, 0.2, 0.5]
    assert (first.options.label_smoothing, second.options.simpo_gamma, third.options) == (0.1, 1.0, None)
    assert [one.loss for one in (first, second)] == [LOSSES["sigmoid"], LOSSES["simpo"]]
    assert {one.beta for one in at_beta((first, second), 0.7)} == {0.7}


def test_sft_coef_adds_to_a_likelihood_that_is_in_the_sum():
    terms = objectives_of(DpoArguments(loss_type="sigmoid,sft:0.25", sft_coef=0.5))
    assert [(one.name, one.weight) for one in terms] == [("sigmoid", 1.0), ("sft", 0.75)]


def test_beta_by_the_step():
    """Of five steps: the first has --beta, the last --final_beta, also in evaluations before and after."""
    linear = schedule_of(DpoArguments(beta=0.1, final_beta=0.5))
    assert [linear.at(step, 5) for step in range(6)] == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5])
    cosine = schedule_of(DpoArguments(beta=0.1, final_beta=0.5, beta_schedule="cosine"))
    quarter = 0.1 + 0.4 * (1 - math.cos(math.pi / 4)) / 2
    assert [cosine.at(step, 5) for step in (1, 2, 3, 5)] == pytest.approx([0.1, quarter, 0.3, 0.5])
    assert schedule_of(DpoArguments(beta=0.3)).at(4, 9) == 0.3
    assert BetaSchedule(0.1, 0.5).at(1, 1) == 0.1
