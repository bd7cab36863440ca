"""How a rejection is spelt, and what is refused."""

from __future__ import annotations

import pytest

from threestep.plugins.mismatch.settings import MismatchSettings, Rejection, rejection_of
from training.utils.base.errors import ThreestepError


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("seq_mean_k1:0.999:1.001", Rejection("seq_mean_k1", 0.999, 1.001)),
        ("token_k1:4", Rejection("token_k1", 0.25, 4.0)),
        ("seq_max_k3:0.01", Rejection("seq_max_k3", None, 0.01)),
    ],
)
def test_spellings(given, expected):
    assert rejection_of(given) == expected


@pytest.mark.parametrize(
    "given",
    ["token_k1", "token_k1:", "token_k1:x", "token_k1:0.5", "token_k1:1.1:2", "token_k1:2:0.5", "token_k1:0:2",
     "token_k2:0.1:0.2", "seq_mean_k3:0", "seq_mean_k3:-1", "token_k1:0.5:2:3", "seq_sum_k1:nan"],
)  # fmt: skip
def test_bounds_that_are_refused(given):
    with pytest.raises(ThreestepError, match=f"the bounds of {given.split(':')[0]} being .*, got '{given}'"):
        rejection_of(given)


@pytest.mark.parametrize("given", ["token_k4:1", "k1:1", "", "geometric:1.001"])
def test_kinds_that_are_unknown(given):
    with pytest.raises(ThreestepError, match=f"KIND one of token_k1, .*, got '{given}'"):
        rejection_of(given)


def test_the_lower_bound():
    assert MismatchSettings("mask", threshold=4.0).least == 0.25
    assert MismatchSettings("mask", threshold=4.0, threshold_lower=0.1).least == 0.1


def test_what_acts():
    assert not MismatchSettings("none").acts
    assert all(each.acts for each in (MismatchSettings("mask"), MismatchSettings("none", veto=0.1),
                                      MismatchSettings("none", bypass=True)))  # fmt: skip
