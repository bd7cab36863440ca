"""The figures of the mismatch, by hand and against their formulas in float64."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from threestep.plugins.mismatch.figures import mismatch_measures
from threestep.plugins.mismatch.settings import MismatchSettings, rejection_of
from threestep.plugins.mismatch.weights import corrected
from training.step3_ppo.contracts.measures import figures_of, moments
from training.utils.contracts.rollout import DrawnTokens

# Ratios p_train / p_rollout: 3, 0.5 | 1.5 | 0.1, 1, 1.
INSIDE = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
RATIO = torch.tensor([[3.0, 0.5, 7.0], [1.5, 7.0, 7.0], [0.1, 1.0, 1.0]])
SAMPLED = torch.full((3, 3), -2.0)
OLD = SAMPLED + RATIO.log()
LOGS = [math.log(each) for each in (3, 0.5, 1.5, 0.1, 1, 1)]


def figures(settings: MismatchSettings | None = None, old: torch.Tensor = OLD) -> dict[str, float]:
    weights_BR = None
    if settings is not None:
        drawn = DrawnTokens(INSIDE, INSIDE.sum(dim=1), SAMPLED)
        counts = torch.ones(3, dtype=torch.bool)
        weights_BR = corrected(old, drawn, counts, settings, over_ranks=lambda values: values).weights_BR
    measures = mismatch_measures(old, SAMPLED, INSIDE, settings, weights_BR=weights_BR)
    return figures_of(measures, moments(measures))


def test_divergences_and_perplexities_by_hand():
    found = figures()
    assert found["mismatch/k1"] == pytest.approx(-sum(LOGS) / 6, abs=1e-5)
    assert found["mismatch/k2"] == pytest.approx(sum(d * d / 2 for d in LOGS) / 6, abs=1e-5)
    assert found["mismatch/k3"] == pytest.approx(sum(math.exp(d) - d - 1 for d in LOGS) / 6, abs=1e-5)
    assert found["rollout/logprob_mismatch"] == pytest.approx(sum(map(abs, LOGS)) / 6, abs=1e-5)
    assert found["mismatch/logprob_difference_max"] == pytest.approx(math.log(10), abs=1e-5)
    # Perplexity is 1 over the geometric mean of the probabilities; the rollout's is e^2 everywhere.
    ratios = [1.5**-0.5, 1 / 1.5, 0.1 ** (-1 / 3)]
    assert found["mismatch/perplexity_ratio"] == pytest.approx(sum(ratios) / 3, rel=1e-5)
    assert found["mismatch/rollout_perplexity"] == pytest.approx(math.exp(2), rel=1e-5)
    assert found["mismatch/train_perplexity"] == pytest.approx(math.exp(2) * sum(ratios) / 3, rel=1e-5)
    differences = [math.log(each) for each in ratios]
    name = "mismatch/log_perplexity_difference"
    assert found[f"{name}_mean"] == pytest.approx(statistics.fmean(differences), abs=1e-5)
    assert found[f"{name}_abs"] == pytest.approx(statistics.fmean(map(abs, differences)), abs=1e-5)
    assert found[f"{name}_std"] == pytest.approx(statistics.pstdev(differences), abs=1e-5)
    assert (found[f"{name}_min"], found[f"{name}_max"]) == pytest.approx((min(differences), max(differences)), abs=1e-5)


@pytest.mark.parametrize(
    ("level", "ratios"),
    [
        ("token", [3, 0.5, 1.5, 0.1, 1, 1]),
        ("sequence", [1.5, 1.5, 0.1]),  # a response counts once
        ("geometric", [1.5**0.5, 1.5, 0.1 ** (1 / 3)]),
    ],
)
def test_ratios_at_each_level(level, ratios):
    found, name = figures(MismatchSettings("none", threshold=1.4, threshold_lower=0.6, veto=1e-4)), f"mismatch/{level}"
    assert found[f"{name}_ratio_mean"] == pytest.approx(statistics.fmean(ratios), rel=1e-5)
    assert found[f"{name}_ratio_std"] == pytest.approx(statistics.pstdev(ratios), rel=1e-5)
    assert (found[f"{name}_ratio_min"], found[f"{name}_ratio_max"]) == pytest.approx(
        (min(ratios), max(ratios)), rel=1e-5
    )
    assert found[f"{name}_ratio_above"] == pytest.approx(sum(each > 1.4 for each in ratios) / len(ratios))
    assert found[f"{name}_ratio_below"] == pytest.approx(sum(each < 0.6 for each in ratios) / len(ratios))
    if level != "geometric":  # which is no ratio of two distributions
        chi2 = statistics.fmean(each**2 for each in ratios) - 1
        assert found[f"{name}_chi2"] == pytest.approx(chi2, rel=1e-5)


def test_weights_and_what_the_bounds_change():
    """Truncated at 2: 2, 0.5, 1.5, 0.1, 1, 1: sum 6.1, squares 8.51; effective sample size 6.1^2 / (6 x 8.51)."""
    found = figures(MismatchSettings("truncate"))
    assert found["mismatch/clipped_share"] == pytest.approx(1 / 6)
    assert found["mismatch/weight_mean"] == pytest.approx(6.1 / 6, rel=1e-5)
    assert found["mismatch/effective_sample_size"] == pytest.approx(6.1**2 / (6 * 8.51), rel=1e-5)
    assert not any("reject" in name or "veto" in name for name in found)


def test_what_is_rejected_by_cause():
    rejection = (rejection_of("token_k1:0.4:2.5"), rejection_of("seq_mean_k1:0.5:2"))
    found = figures(MismatchSettings("none", rejection=rejection, veto=0.2))
    assert found["mismatch/rejected_token_k1"] == pytest.approx(2 / 6)  # 3 and 0.1
    assert found["mismatch/rejected_seq_mean_k1"] == pytest.approx(3 / 6)  # 0.1^(1/3) = 0.464
    assert found["mismatch/vetoed_share"] == pytest.approx(1 / 3)
    assert found["mismatch/rejected_share"] == pytest.approx(4 / 6)
    assert found["mismatch/effective_sample_size"] == pytest.approx(2 / 6)  # two of six weigh 1
    assert "mismatch/clipped_share" not in found


def test_equal_policies():
    found = figures(MismatchSettings("truncate"), old=SAMPLED)
    for name in ("k1", "k2", "k3", "token_chi2", "sequence_chi2", "clipped_share", "log_perplexity_difference_abs"):
        assert found[f"mismatch/{name}"] == 0
    assert found["mismatch/effective_sample_size"] == found["mismatch/perplexity_ratio"] == 1
