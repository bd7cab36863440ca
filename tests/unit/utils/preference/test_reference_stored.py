"""What the reference said, kept and found again: by content alone, whole or not at all."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.support.data_flags import data_flags
from training.utils.preference.reference import ReferenceFile, RowLogprobs, reference_file

PARTS = {"format": "1", "data": "d", "model": "m", "dtype": "fp32", "layout": "packed", "transformers": "5"}
KNOWN = RowLogprobs(np.array([1, 4, 6]), np.array([[-1, -2, 0], [-3, -4, -5], [-6, -7, 0]], np.float32))


def test_rows_are_found_by_number():
    got = KNOWN.of(np.array([6, 1, 4]), np.array([1, 0, 2]))
    assert got.tolist() == [-7, -1, -5] and got.dtype == np.float32
    assert KNOWN.of(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []
    assert KNOWN.lacking([1, 2, 6, 7]) == [2, 7] and RowLogprobs.none().lacking([0, 3]) == [0, 3]


@pytest.mark.parametrize("row", [0, 5, 7])
def test_a_row_that_was_not_read_is_refused(row):
    with pytest.raises(AssertionError, match="a row was not read"):
        KNOWN.of(np.array([1, row]), np.array([0, 0]))


def test_rows_of_two_readings_are_joined():
    both = KNOWN.joined(RowLogprobs(np.array([0, 5]), np.array([[-8, -9], [-10, -11]], np.float32)))
    assert both.rows_R.tolist() == [0, 1, 4, 5, 6]
    assert both.logprobs_RK.tolist() == [[-8, -9, 0], [-1, -2, 0], [-3, -4, -5], [-10, -11, 0], [-6, -7, 0]]
    alone = RowLogprobs.none().joined(KNOWN)
    assert alone.logprobs_RK.tolist() == KNOWN.logprobs_RK.tolist()


def kept(folder, **changes) -> ReferenceFile:
    return ReferenceFile(str(folder), {**PARTS, **changes})


def test_what_is_written_is_read(tmp_path):
    assert kept(tmp_path).read() == ({}, "none was read before with this model or data")
    kept(tmp_path).write({"train": KNOWN, "eval": RowLogprobs.none()})
    splits, reason = kept(tmp_path).read()
    assert reason == "" and splits.keys() == {"train", "eval"} and len(splits["eval"].rows_R) == 0
    assert splits["train"].rows_R.tolist() == [1, 4, 6]
    assert splits["train"].logprobs_RK.tolist() == KNOWN.logprobs_RK.tolist()
    assert [path.name for path in tmp_path.iterdir()] == [kept(tmp_path).path.name]  # nothing half-made beside it


@pytest.mark.parametrize("part", ["data", "model", "dtype", "layout", "transformers"])
def test_every_part_counts_and_the_changed_one_is_said(tmp_path, part):
    kept(tmp_path).write({"train": KNOWN})
    assert kept(tmp_path, **{part: "other"}).read() == ({}, f"changed since the last one: {part}")
    assert kept(tmp_path, data="other", model="other").read()[1] == "none was read before with this model or data"


def test_rebuilding_reads_nothing(tmp_path):
    kept(tmp_path).write({"train": KNOWN})
    assert ReferenceFile(str(tmp_path), PARTS, rebuild=True).read() == ({}, "rebuild_cache was asked for")


@pytest.mark.parametrize("how", ["a byte", "cut", "empty", "another's"])
def test_a_damaged_file_is_not_used(tmp_path, how):
    file = kept(tmp_path)
    file.write({"train": KNOWN})
    content = file.path.read_bytes()
    if how == "a byte":
        content = content[:-1] + bytes([content[-1] ^ 1])
    elif how == "another's":
        kept(tmp_path, dtype="bf16").write({"train": KNOWN})
        content = kept(tmp_path, dtype="bf16").path.read_bytes()
    file.path.write_bytes({"cut": content[:-5], "empty": b""}.get(how, content))
    assert file.read() == ({}, "the cached file was damaged")
    file.write({"train": KNOWN})
    assert file.read()[1] == ""


class Rows:
    """Training rows of the cache in all that is asked of them here."""

    def __init__(self, fingerprint: str) -> None:
        self.manifest = {"fingerprint": fingerprint}


def test_the_parts_are_content(tmp_path):
    """A model that was moved is the same, one whose weights or configuration changed is another."""
    data = data_flags(data_output_path=str(tmp_path / "cache"))
    names = {"one": (b"weights", {"a": 1}), "moved": (b"weights", {"a": 1})}
    names |= {"trained": (b"weightz", {"a": 1}), "reshaped": (b"weights", {"a": 2})}
    for name, (weights, config) in names.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "tokenizer.json").write_text(name)  # no part: the data's fingerprint has it

    def path(name, fingerprint="d", dtype="fp32", packed=True, others=None):
        return reference_file(str(tmp_path / name), Rows(fingerprint), data, dtype, packed=packed, others=others).path

    assert path("one") == path("moved")
    others = [path("trained"), path("reshaped"), path("one", "e"), path("one", dtype="bf16"), path("one", packed=False)]
    others += [path("one", others={"responses": "of other rows"})]
    assert path("one") == path("one", others={}) and len({path("one"), *others}) == 7
    assert path("one").parent == tmp_path / "cache"
