"""Importance weights between rollout and training log-probabilities, and the figures of the mismatch."""

from __future__ import annotations

import math

import pytest
import torch

from training.step3_ppo.mismatch import MismatchSettings, clipped_tokens, importance_weights, mismatch_sums

# Ratios p_train / p_rollout: 3, 0.5 | 1.5 | 0.1, 1, 1 (the third row's product is 0.1, the first's 1.5).
INSIDE = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
LOG_RATIO = torch.tensor([[3.0, 0.5, 7.0], [1.5, 7.0, 7.0], [0.1, 1.0, 1.0]]).log()
SAMPLED = torch.full((3, 3), -2.0)
OLD = SAMPLED + LOG_RATIO


@pytest.mark.parametrize(
    ("correction", "level", "expected", "clipped"),
    [
        # threshold 2
        ("truncate", "token", [[2, 0.5, 0], [1.5, 0, 0], [0.1, 1, 1]], 1),
        # between 0.5 and 2
        ("mask", "token", [[0, 0.5, 0], [1.5, 0, 0], [0, 1, 1]], 2),
        ("truncate", "sequence", [[1.5, 1.5, 0], [1.5, 0, 0], [0.1, 0.1, 0.1]], 0),
        ("mask", "sequence", [[1.5, 1.5, 0], [1.5, 0, 0], [0, 0, 0]], 3),
    ],
)
def test_by_hand(correction, level, expected, clipped):
    threshold = 2.0 * (1 + 1e-6)  # 1 / 2 is inside, rounding or not
    settings = MismatchSettings(correction, level, threshold)
    weights_BR = importance_weights(OLD, SAMPLED, INSIDE, settings)
    torch.testing.assert_close(weights_BR, torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-6)
    assert clipped_tokens(OLD, SAMPLED, INSIDE, settings) == clipped


@pytest.mark.parametrize("correction", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_equal_policies_weigh_one_and_padding_nothing(correction, level):
    wider = torch.nn.functional.pad(SAMPLED, (0, 2), value=float("nan"))
    inside = torch.nn.functional.pad(INSIDE, (0, 2))
    settings = MismatchSettings(correction, level, 2.0)
    assert torch.equal(importance_weights(wider, wider, inside, settings), inside.float())


def test_policies_that_have_nothing_in_common_stay_finite():
    weights_BR = importance_weights(OLD + 1e4, SAMPLED, INSIDE, MismatchSettings("truncate", "sequence", float("inf")))
    assert torch.isfinite(weights_BR).all()


def test_the_figures_by_hand():
    sums = mismatch_sums(OLD, SAMPLED, INSIDE)
    logs = [math.log(3), math.log(0.5), math.log(1.5), math.log(0.1), 0.0, 0.0]
    assert sums["k1"] == pytest.approx(-sum(logs), abs=1e-5)
    assert sums["k3"] == pytest.approx(sum(math.exp(d) - d - 1 for d in logs), abs=1e-5)
    assert sums["absolute"] == pytest.approx(sum(map(abs, logs)), abs=1e-5)
    # Perplexity is 1 over the geometric mean of the probabilities: 1 / sqrt(1.5), 1 / 1.5, 1 / cbrt(0.1).
    assert sums["perplexity_ratio"] == pytest.approx(1.5**-0.5 + 1 / 1.5 + 0.1 ** (-1 / 3), rel=1e-5)
    assert mismatch_sums(SAMPLED, SAMPLED, INSIDE) == {"k1": 0, "k3": 0, "absolute": 0, "perplexity_ratio": 3}


def test_the_ratio_makes_means_of_one_policy_those_of_the_other():
    """Over tokens drawn from the rollout's policy, rho f has the mean of f under the trainer's."""
    train, rollout = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)
    values = torch.arange(6.0, dtype=torch.float64)
    every = torch.ones(6, 1, dtype=torch.bool)  # six one-token responses, one for each token there is
    settings = MismatchSettings("truncate", "token", float("inf"))
    weights = importance_weights(train[:, None], rollout[:, None], every, settings)[:, 0]
    torch.testing.assert_close((rollout.exp() * weights * values).sum(), (train.exp() * values).sum())
