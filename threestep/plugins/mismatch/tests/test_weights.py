"""Importance weights, rejections and figures between rollout and training log-probabilities: by hand, in float64."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from typing import Any

import pytest
import torch

from threestep.plugins.mismatch.figures import mismatch_measures
from threestep.plugins.mismatch.recipes import REJECTIONS
from threestep.plugins.mismatch.rejection import kept_by, kept_tokens, vetoed
from threestep.plugins.mismatch.settings import MismatchSettings, rejection_of
from threestep.plugins.mismatch.weights import corrected, importance_weights, loss_weights, ratios, sequences_of
from training.step3_ppo.contracts.measures import figures_of, moments
from training.utils.contracts.rollout import DrawnTokens

# Ratios p_train / p_rollout: 3, 0.5 | 1.5 | 0.1, 1, 1. Products: 1.5, 1.5, 0.1; geometric means: sqrt(1.5) = 1.2247,
# 1.5, 0.1^(1/3) = 0.4642.
INSIDE = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
LOG_RATIO = torch.tensor([[3.0, 0.5, 7.0], [1.5, 7.0, 7.0], [0.1, 1.0, 1.0]]).log()
SAMPLED = torch.full((3, 3), -2.0)
OLD = SAMPLED + LOG_RATIO
COUNTS = torch.tensor([True, True, True])


def drawn(sampled, inside) -> DrawnTokens:
    return DrawnTokens(inside, inside.sum(dim=1), sampled)


def weighed(settings: MismatchSettings, old=OLD, sampled=SAMPLED, inside=INSIDE, counts=COUNTS) -> torch.Tensor:
    return corrected(old, drawn(sampled, inside), counts, settings, over_ranks=lambda values: values).weights_BR


@pytest.mark.parametrize(
    ("correction", "level", "lower", "expected"),
    [
        # threshold 2
        ("truncate", "token", None, [[2, 0.5, 0], [1.5, 0, 0], [0.1, 1, 1]]),
        ("truncate", "token", 0.2, [[2, 0.5, 0], [1.5, 0, 0], [0.2, 1, 1]]),
        # between 0.5 and 2
        ("mask", "token", None, [[0, 0.5, 0], [1.5, 0, 0], [0, 1, 1]]),
        ("mask", "token", 0.05, [[0, 0.5, 0], [1.5, 0, 0], [0.1, 1, 1]]),
        ("truncate", "sequence", None, [[1.5, 1.5, 0], [1.5, 0, 0], [0.1, 0.1, 0.1]]),
        ("mask", "sequence", None, [[1.5, 1.5, 0], [1.5, 0, 0], [0, 0, 0]]),
        ("truncate", "geometric", None, [[1.2247449, 1.2247449, 0], [1.5, 0, 0], [0.4641589, 0.4641589, 0.4641589]]),
        ("mask", "geometric", None, [[1.2247449, 1.2247449, 0], [1.5, 0, 0], [0, 0, 0]]),
    ],
)
def test_by_hand(correction, level, lower, expected):
    threshold = 2.0 * (1 + 1e-6)  # 1 / 2 is inside, rounding or not
    weights_BR = weighed(MismatchSettings(correction, level, threshold, lower))
    torch.testing.assert_close(weights_BR, torch.tensor(expected, dtype=torch.float32), rtol=1e-5, atol=1e-6)


def test_normalized_by_hand():
    """Truncated at 2: tokens 2, 0.5 | 1.5 | 0.1, 1, 1 sum to 6.1 over 6; without the second response, 4.6 over 5."""
    token = MismatchSettings("truncate", "token", 2.0, normalize=True)
    torch.testing.assert_close(weighed(token)[0, 0], torch.tensor(2 / (6.1 / 6)))
    alone = torch.tensor([True, False, True])
    torch.testing.assert_close(weighed(token, counts=alone)[1, 0], torch.tensor(1.5 / (4.6 / 5)))
    # Products 1.5, 1.5, 0.1: a mean of 3.1 / 3 over responses, however long they are.
    sequence = MismatchSettings("truncate", "sequence", 2.0, normalize=True)
    torch.testing.assert_close(weighed(sequence)[2, 2], torch.tensor(0.1 / (3.1 / 3)))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_ranks_normalize_by_the_mean_of_all(level):
    """Two ranks that know each other's sums weigh as one rank with all responses."""
    settings = MismatchSettings("truncate", level, 2.0, normalize=True)
    whole = weighed(settings)
    shares = [slice(0, 1), slice(1, 3)]
    sums: list[torch.Tensor] = []

    def of(share: slice, over_ranks: Any) -> torch.Tensor:
        own = drawn(SAMPLED[share], INSIDE[share])
        return corrected(OLD[share], own, COUNTS[share], settings, over_ranks=over_ranks).weights_BR

    for share in shares:
        of(share, lambda own: sums.append(own) or own)
    for share in shares:
        torch.testing.assert_close(of(share, lambda _: sum(sums)), whole[share])


def test_far_policies_stay_finite_and_rejections_join_the_weights():
    assert torch.isfinite(weighed(MismatchSettings("truncate", "sequence", float("inf")), old=OLD + 1e4)).all()
    # All are rejected by their bounds: 0, whatever the mean is.
    assert not weighed(MismatchSettings("mask", "token", 1.5, normalize=True), old=SAMPLED + 3.0).any()
    settings = MismatchSettings("truncate", "token", 2.0, rejection=(rejection_of("token_k1:0.4:2.5"),))
    torch.testing.assert_close(weighed(settings), torch.tensor([[0, 0.5, 0], [1.5, 0, 0], [0, 1, 1]]))


@pytest.mark.parametrize(
    ("correction", "level"),
    list(itertools.product(["none", "truncate", "mask"], ["token", "sequence", "geometric"])),
)
def test_equal_policies_weigh_one_and_padding_nothing(correction, level):
    wider = torch.nn.functional.pad(SAMPLED, (0, 2), value=float("nan"))
    inside = torch.nn.functional.pad(INSIDE, (0, 2))
    settings = MismatchSettings(correction, level, 2.0, normalize=correction != "none")
    assert torch.equal(weighed(settings, wider, wider, inside), inside.float())


def test_what_is_rejected_weighs_nothing_and_leaves_the_denominators_if_asked():
    """The veto at 0.2 takes the third response, with its 0.1."""
    stay, leave = (
        corrected(OLD, drawn(SAMPLED, INSIDE), COUNTS, settings, over_ranks=torch.clone)
        for settings in (MismatchSettings("none", veto=0.2), MismatchSettings("none", veto=0.2, rejected="leave"))
    )
    torch.testing.assert_close(stay.weights_BR, torch.tensor([[1.0, 1, 0], [1, 0, 0], [0, 0, 0]]))
    assert stay.kept_BR is None and torch.equal(leave.weights_BR, stay.weights_BR)
    assert leave.kept_BR is not None and torch.equal(leave.kept_BR, stay.weights_BR.bool())


def plain_weights(log_ratios: list[list[float]], settings: MismatchSettings) -> list[list[float]]:
    """Line by line from the formulas, in Python's float64: weights, their mean, what is kept."""
    weights, kept = [], []
    for row in log_ratios:
        exponent = {"token": row, "sequence": [sum(row)] * len(row), "geometric": [sum(row) / len(row)] * len(row)}
        rho = [math.exp(min(max(each, -20.0), 20.0)) for each in exponent[settings.level]]
        upper, lower = settings.threshold, settings.threshold_lower
        if settings.correction == "none":
            weights.append([1.0] * len(row))
        elif settings.correction == "truncate":
            weights.append([min(each, upper) if lower is None else max(min(each, upper), lower) for each in rho])
        else:
            least = 1 / upper if lower is None else lower
            weights.append([each if least <= each <= upper else 0.0 for each in rho])
        vetoed = settings.veto is not None and any(math.exp(each) < settings.veto for each in row)
        kept.append([not vetoed] * len(row))
    mean = 1.0
    if settings.normalize and settings.level == "token":
        mean = sum(map(sum, weights)) / sum(map(len, weights))
    elif settings.normalize:
        mean = sum(row[0] for row in weights) / len(weights)
    return [
        [weight / (mean or 1.0) if keeps else 0.0 for weight, keeps in zip(row, keep, strict=True)]
        for row, keep in zip(weights, kept, strict=True)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_the_formulas_in_float64(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = [int(torch.randint(1, 7, (1,), generator=generator)) for _ in range(5)]
    inside_BR = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    difference_BR = torch.randn(inside_BR.shape, generator=generator, dtype=torch.float64)
    sampled_BR = torch.randn(inside_BR.shape, generator=generator, dtype=torch.float64) - 3
    rows = [difference_BR[row, :length].tolist() for row, length in enumerate(lengths)]
    for correction, level, lower, normalize, veto in itertools.product(
        ("none", "truncate", "mask"), ("token", "sequence", "geometric"), (None, 0.3), (False, True), (None, 0.2)
    ):
        settings = MismatchSettings(correction, level, 1.7, lower, normalize, veto)
        got_BR = weighed(settings, sampled_BR + difference_BR, sampled_BR, inside_BR, torch.ones(5, dtype=torch.bool))
        for row, want in enumerate(plain_weights(rows, settings)):
            assert got_BR[row, : len(want)].tolist() == pytest.approx(want, rel=1e-12, abs=1e-12), settings


def test_a_bypass_weighs_a_micro_batch_as_the_experience_would():
    settings = MismatchSettings("truncate", "sequence", 2.0, veto=0.2, bypass=True)
    log_ratio_M, sequence_M = (OLD - SAMPLED)[INSIDE], sequences_of(INSIDE)
    expected = importance_weights(log_ratio_M, sequence_M, settings) * kept_tokens(log_ratio_M, sequence_M, settings)
    torch.testing.assert_close(loss_weights(log_ratio_M, sequence_M, settings), expected)
    torch.testing.assert_close(expected, weighed(dataclasses.replace(settings, bypass=False))[INSIDE])


def test_the_ratio_makes_means_of_one_policy_those_of_the_other():
    """Over tokens drawn from the rollout's policy, rho f has the mean of f under the trainer's."""
    train, rollout = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(-1)
    values = torch.arange(6.0, dtype=torch.float64)
    rho = ratios(train - rollout, torch.arange(6), "token")  # six one-token responses, one for each token there is
    torch.testing.assert_close((rollout.exp() * rho * values).sum(), (train.exp() * values).sum())


# Two responses, r = 2, 1, 1/4 (the module's worked row) and r = 1.
TWO_ROWS = torch.tensor([2.0, 1.0, 0.25, 1.0], dtype=torch.float64).log()
OF_TWO = torch.tensor([0, 0, 0, 1])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("token_k1:0.5:1.5", [False, True, False, True]),
        ("token_k1:2", [True, True, False, True]),  # 1 / 2 <= r <= 2
        ("token_k2:0.25", [True, True, False, True]),  # 0.240, 0, 0.961
        ("token_k3:0.31", [True, True, False, True]),  # 0.307, 0, 0.636
        ("seq_sum_k1:0.49:1.1", [True, True, True, True]),  # 1/2
        ("seq_sum_k1:0.51:1.1", [False, False, False, True]),
        ("seq_mean_k1:0.79:1.1", [True, True, True, True]),  # 0.794
        ("seq_mean_k1:0.80:1.1", [False, False, False, True]),
        ("seq_max_k1:0.2:2.5", [True, True, True, True]),  # every r
        ("seq_max_k1:0.3:2.5", [False, False, False, True]),
        ("seq_sum_k2:1.21", [True, True, True, True]),  # 1.201
        ("seq_sum_k2:1.19", [False, False, False, True]),
        ("seq_mean_k2:0.39", [False, False, False, True]),  # 0.400
        ("seq_max_k2:0.95", [False, False, False, True]),  # 0.961
        ("seq_sum_k3:0.95", [True, True, True, True]),  # 0.943
        ("seq_mean_k3:0.31", [False, False, False, True]),  # 0.314
        ("seq_max_k3:0.64", [True, True, True, True]),  # 0.636
    ],
)
def test_rejections_by_hand(given, expected):
    assert kept_by(TWO_ROWS, OF_TWO, rejection_of(given)).tolist() == expected


def plain_kept(row: list[float], kind: str, lower: float | None, upper: float) -> list[bool]:
    scope, estimate = kind.rsplit("_", 1)
    if estimate == "k1":
        assert lower is not None
        if scope == "token":
            return [lower <= math.exp(d) <= upper for d in row]
        if scope == "seq_max":
            return [all(lower <= math.exp(d) <= upper for d in row)] * len(row)
        ratio = math.exp(sum(row) if scope == "seq_sum" else sum(row) / len(row))
        return [lower <= ratio <= upper] * len(row)
    values = [d * d / 2 if estimate == "k2" else math.exp(d) - 1 - d for d in row]
    if scope == "token":
        return [value <= upper for value in values]
    whole = {"seq_sum": sum(values), "seq_mean": sum(values) / len(values), "seq_max": max(values)}[scope]
    return [whole <= upper] * len(row)


@pytest.mark.parametrize("kind", REJECTIONS)
def test_every_kind_equals_its_formula(kind):
    generator = torch.Generator().manual_seed(len(kind))
    bounds = "0.7:1.6" if kind.endswith("k1") else "0.2"
    rejection = rejection_of(f"{kind}:{bounds}")
    found: set[bool] = set()
    for _ in range(30):
        lengths = torch.randint(1, 5, (4,), generator=generator)
        log_ratio_M = torch.randn(int(lengths.sum()), generator=generator, dtype=torch.float64) * 0.5
        sequence_M = torch.repeat_interleave(torch.arange(4), lengths)
        rows = [part.tolist() for part in log_ratio_M.split(lengths.tolist())]
        want = [keeps for row in rows for keeps in plain_kept(row, kind, rejection.lower, rejection.upper)]
        assert kept_by(log_ratio_M, sequence_M, rejection).tolist() == want
        found |= set(want)
    assert found == {True, False}


def test_the_veto_drops_the_response_of_one_token():
    assert vetoed(TWO_ROWS, OF_TWO, 0.3).tolist() == [True, True, True, False]
    assert not vetoed(TWO_ROWS, OF_TWO, 0.2).any()
    both = MismatchSettings("none", veto=0.3, rejection=(rejection_of("token_k1:1.5"),))
    assert kept_tokens(TWO_ROWS, OF_TWO, both).tolist() == [False, False, False, True]


def test_no_tokens():
    nothing = torch.empty(0)
    settings = MismatchSettings("none", veto=0.3, rejection=tuple(rejection_of(f"{kind}:2") for kind in REJECTIONS))
    assert kept_tokens(nothing, torch.empty(0, dtype=torch.int64), settings).shape == (0,)


LOGS = [math.log(each) for each in (3, 0.5, 1.5, 0.1, 1, 1)]


def figures(settings: MismatchSettings | None = None, old: torch.Tensor = OLD) -> dict[str, float]:
    weights_BR = None if settings is None else weighed(settings, old)
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
