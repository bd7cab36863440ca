"""Which evaluation is the best."""

from __future__ import annotations

import pytest

from threestep.plugins.best_model.best import Best, is_better, metric_in

FIGURES = {"eval/loss": 1.0, "eval/accuracy": 0.5, "eval_greedy/reward": 2.0}


@pytest.mark.parametrize(
    ("asked", "metric"),
    [
        (None, "eval/loss"),
        ("loss", "eval/loss"),
        ("eval_accuracy", "eval/accuracy"),
        ("eval/accuracy", "eval/accuracy"),
        ("eval_greedy/reward", "eval_greedy/reward"),
    ],
)
def test_names_of_a_metric(asked, metric):
    assert metric_in(FIGURES, asked) == metric


def test_step_threes_default_is_the_reward():
    assert metric_in({**FIGURES, "eval/reward": 0.0}, None) == "eval/reward"


def test_better_is_strictly_better_and_finite():
    best = Best(1, "eval/loss", 1.0)
    assert is_better(0.5, best, False) and not is_better(1.0, best, False) and not is_better(1.0, best, True)
    assert is_better(5.0, None, False) and not is_better(float("inf"), None, True)
