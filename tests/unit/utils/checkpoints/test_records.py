"""A record of another version is named in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.checkpoints.records import check_keys, record_of


@dataclass(frozen=True)
class Score:
    loss: float
    accuracy: float = 0.5


def test_what_this_version_knows():
    check_keys({"before": 1}, ("before", "after"), "the state")
    assert record_of(Score, {"loss": 1.5}, "the evaluation") == Score(1.5)


def test_what_it_does_not_know():
    remedy = "resume with the version of Threestep that wrote the checkpoint"
    with pytest.raises(
        ThreestepError, match=f"--resume: the state holds a, z, which this version does not know; {remedy}"
    ):
        check_keys({"z": 1, "before": 1, "a": 0}, ("before", "after"), "the state")
    with pytest.raises(ThreestepError, match=f"the score is not .*got an unexpected keyword argument 'f1'.*; {remedy}"):
        record_of(Score, {"loss": 1.5, "f1": 2}, "the score")
    with pytest.raises(ThreestepError, match=f"writes .missing 1 required positional argument: 'loss'.; {remedy}"):
        record_of(Score, {}, "the score")
