"""Rejection by divergence: worked rows, every kind against its formula in float64, bounds on the ratio itself."""

from __future__ import annotations

import math

import pytest
import torch

from threestep.plugins.mismatch.recipes import REJECTIONS
from threestep.plugins.mismatch.rejection import kept_by, kept_tokens, vetoed
from threestep.plugins.mismatch.settings import MismatchSettings, rejection_of

# Two responses, r = 2, 1, 1/4 (the module's worked row) and r = 1.
LOG_RATIO = torch.tensor([2.0, 1.0, 0.25, 1.0], dtype=torch.float64).log()
SEQUENCE = torch.tensor([0, 0, 0, 1])


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
def test_by_hand(given, expected):
    assert kept_by(LOG_RATIO, SEQUENCE, rejection_of(given)).tolist() == expected


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


def test_bounds_of_k1_are_on_the_ratio():
    """A ratio of 1.6 is inside 0.1 to 2 and its inverse too; one of 4 is inside 0.1 to 5 where its inverse, 1/4, is
    not inside 0.3 to 5."""
    once = torch.tensor([4.0], dtype=torch.float64).log()
    assert kept_by(once, torch.tensor([0]), rejection_of("token_k1:0.3:5")).item()
    assert not kept_by(-once, torch.tensor([0]), rejection_of("token_k1:0.3:5")).item()


def test_the_veto_drops_the_response_of_one_token():
    assert vetoed(LOG_RATIO, SEQUENCE, 0.3).tolist() == [True, True, True, False]
    assert not vetoed(LOG_RATIO, SEQUENCE, 0.2).any()
    both = MismatchSettings("none", veto=0.3, rejection=(rejection_of("token_k1:1.5"),))
    assert kept_tokens(LOG_RATIO, SEQUENCE, both).tolist() == [False, False, False, True]


def test_no_tokens():
    nothing = torch.empty(0)
    settings = MismatchSettings("none", veto=0.3, rejection=tuple(rejection_of(f"{kind}:2") for kind in REJECTIONS))
    assert kept_tokens(nothing, torch.empty(0, dtype=torch.int64), settings).shape == (0,)
