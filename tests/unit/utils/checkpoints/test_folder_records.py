"""A record of another version is named in a sentence."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.checkpoints.folder import as_written, check_keys, read_record, record_of


@dataclass(frozen=True)
class Score:
    loss: float
    accuracy: float = 0.5


def test_what_this_version_knows():
    check_keys({"before": 1, "after": 2}, ("before", "after"), "the state")
    check_keys({"before": 1}, ("before",), "the state", optional=("after",))
    check_keys({"before": 1, "after": 2}, ("before",), "the state", optional=("after",))
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
    with pytest.raises(ThreestepError, match=f"the state lacks a, b, which this version writes; {remedy}"):
        check_keys({"before": 1}, ("before", "b", "a"), "the state", optional=("after",))
    with pytest.raises(ThreestepError, match=f"--resume: the state is no table of a, b; {remedy}"):
        check_keys([1], ("b", "a"), "the state")


def test_what_cannot_be_read(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(ThreestepError, match=f"--resume: there is no {path}; resume with"):
        read_record(path)
    for text in ("[" * 100_000, "{", "\xff"):
        path.write_text(text, "latin-1")
        with pytest.raises(ThreestepError, match=f"--resume: {path} is not what this version writes .*; resume with"):
            read_record(path)
    path.write_text('{"a": [1]}')
    assert read_record(path) == {"a": [1]}
    with pytest.raises(ThreestepError, match=r"--resume: c is not what this version writes \(KeyError: 'b'\); resume"):
        with as_written("c"):
            read_record(path)["b"]
    with pytest.raises(OSError, match="full"), as_written("c"):
        raise OSError(28, "full")  # is no matter of the record's form
