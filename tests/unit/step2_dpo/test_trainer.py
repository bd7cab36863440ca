"""A run of direct preference optimisation: what it watches, and says at its end."""

from __future__ import annotations

from dataclasses import replace

from tests.support.objectives import objectives
from training.step2_dpo.loss import Objective
from training.step2_dpo.trainer import DpoEvaluation, _uniform, closing_figures, closing_sentence
from training.utils.plugins.objectives import PreferenceLoss
from training.utils.run.divergence import EQUAL_PAIRS


def test_the_closing_figures():
    before, after = DpoEvaluation(0.6931, 0.0, 0.0, 0.0, 0.0), DpoEvaluation(0.51, 0.75, 1.5, 0.5, -1.0)
    assert closing_figures(before, after) == {
        "eval_loss_before": 0.6931,
        "eval_loss": 0.51,
        "eval_accuracy": 0.75,
        "eval_reward_margin": 1.5,
        "eval_chosen_reward": 0.5,
        "eval_rejected_reward": -1.0,
    }
    said = "evaluation loss 0.693 -> 0.510, pair accuracy 0.750, reward margin 1.50"
    assert closing_sentence(before, after) == said


def test_without_evaluation_rows_the_same_figures_are_none():
    full = DpoEvaluation(1.0, 1.0, 1.0, 1.0, 1.0)
    assert closing_figures(None, None) == dict.fromkeys(closing_figures(full, full))


def test_the_loss_of_equal_pairs():
    """A sign of divergence for losses that have one, unless another term is added; where training begins, if the policy
    is its reference then."""
    assert _uniform(objectives("sigmoid", 0.1)) == EQUAL_PAIRS
    assert _uniform(objectives("sigmoid", 0.1, sft_coef=1.0)) is _uniform(objectives("ipo", 0.1)) is None
    free = PreferenceLoss("", lambda m, _: m, needs_reference=False, loss_of_equal_pairs=lambda how: how.beta)
    assert _uniform([Objective(free, 2.0)]) == replace(EQUAL_PAIRS, nats=2.0, begins_there=False)
