"""Importance weights between rollout and training log-probabilities."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from threestep.plugins.mismatch.rejection import kept_tokens
from threestep.plugins.mismatch.settings import MismatchSettings, rejection_of
from threestep.plugins.mismatch.weights import corrected, importance_weights, loss_weights, ratios, sequences_of
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


def test_weights_that_are_all_rejected_by_their_bounds_stay_zero():
    settings = MismatchSettings("mask", "token", 1.5, normalize=True)
    assert not weighed(settings, old=SAMPLED + 3.0).any()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_ranks_normalize_by_the_mean_of_all(level):
    """Two ranks that know each other's sums weigh as one rank with all responses."""
    settings = MismatchSettings("truncate", level, 2.0, normalize=True)
    whole = weighed(settings)
    shares = [slice(0, 1), slice(1, 3)]
    sums: list[torch.Tensor] = []
    for share in shares:
        corrected(
            OLD[share], drawn(SAMPLED[share], INSIDE[share]), COUNTS[share], settings,
            over_ranks=lambda own: sums.append(own) or own,
        )  # fmt: skip
    for share in shares:
        own = corrected(
            OLD[share], drawn(SAMPLED[share], INSIDE[share]), COUNTS[share], settings, over_ranks=lambda _: sum(sums)
        )
        torch.testing.assert_close(own.weights_BR, whole[share])


@pytest.mark.parametrize(
    ("correction", "level"),
    list(itertools.product(["none", "truncate", "mask"], ["token", "sequence", "geometric"])),
)
def test_equal_policies_weigh_one_and_padding_nothing(correction, level):
    wider = torch.nn.functional.pad(SAMPLED, (0, 2), value=float("nan"))
    inside = torch.nn.functional.pad(INSIDE, (0, 2))
    settings = MismatchSettings(correction, level, 2.0, normalize=correction != "none")
    assert torch.equal(weighed(settings, wider, wider, inside), inside.float())


def test_policies_that_have_nothing_in_common_stay_finite():
    assert torch.isfinite(weighed(MismatchSettings("truncate", "sequence", float("inf")), old=OLD + 1e4)).all()


def test_what_is_rejected_weighs_nothing_and_leaves_the_denominators_if_asked():
    """The veto at 0.2 takes the third response, with its 0.1."""
    stay = corrected(OLD, drawn(SAMPLED, INSIDE), COUNTS, MismatchSettings("none", veto=0.2), over_ranks=torch.clone)
    torch.testing.assert_close(stay.weights_BR, torch.tensor([[1.0, 1, 0], [1, 0, 0], [0, 0, 0]]))
    assert stay.kept_BR is None
    leaves = MismatchSettings("none", veto=0.2, rejected="leave")
    leave = corrected(OLD, drawn(SAMPLED, INSIDE), COUNTS, leaves, over_ranks=torch.clone)
    assert leave.kept_BR is not None and leave.kept_BR.tolist() == [
        [True, True, False],
        [True, False, False],
        [False] * 3,
    ]
    assert torch.equal(leave.weights_BR, stay.weights_BR)


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


def test_a_rejection_joins_the_weights():
    settings = MismatchSettings("truncate", "token", 2.0, rejection=(rejection_of("token_k1:0.4:2.5"),))
    torch.testing.assert_close(weighed(settings), torch.tensor([[0, 0.5, 0], [1.5, 0, 0], [0, 1, 1]]))
