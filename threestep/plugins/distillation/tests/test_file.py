"""A file of likeliest tokens is read as it was written, or refused with its line."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from threestep.plugins.distillation.file import keys_of_row, read_table, write_table
from threestep.plugins.distillation.top_tokens import TopTable, keys_of
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import SentenceRow

ROWS = [
    SentenceRow(0, np.array([5, 6, 7, 0], np.int32), np.array([False, False, True, True])),
    SentenceRow(1, np.array([5, 8], np.int32), np.array([False, True])),
]


def table() -> TopTable:
    keys = [key for row in ROWS for key in keys_of_row(row)]
    top = np.array([[1, 2], [3, 4], [5, 6]], np.int32)
    logprobs = np.log(np.array([[0.5, 0.2], [0.6, 0.3], [0.7, 0.1]], np.float32))
    return TopTable(keys, top, logprobs, np.log(np.array([0.3, 0.1, 0.2], np.float32)))


@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet"])
def test_what_is_written_is_read(tmp_path, name: str):
    write_table(tmp_path / "new" / name, ROWS, table())
    found = read_table(tmp_path / "new" / name)
    for row in ROWS:
        assert not found.lacks(keys_of_row(row))
        for own, theirs in zip(found.of(keys_of_row(row)), table().of(keys_of_row(row)), strict=True):
            torch.testing.assert_close(own, theirs)
    assert [each.name for each in (tmp_path / "new").iterdir()] == [name]
    assert keys_of_row(ROWS[0]) == keys_of([5, 6, 7])[1:]


GOOD = {"input_ids": [5, 6, 7], "places": [1, 2], "top_ids": [[1, 2], [3, 4]], "top_logprobs": [[-1, -2], [-1, -3]]}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"places": [0, 2]}, "expected places within input_ids, from 1 on, ascending; write the file again"),
        ({"places": [1, 3]}, "expected places within input_ids"),
        ({"top_ids": [[1], [3]]}, "expected lists of 2 tokens at each place"),
        ({"top_ids": [[1, 2], [3]]}, "expected as many numbers at each place"),
        ({"top_ids": [[1, 1], [3, 4]]}, "expected no token twice at a place"),
        ({"top_logprobs": [[-1, -2], [-1, 0.3]]}, "expected log-probabilities of at most 0 and no NaN"),
        ({"rest_logprobs": [-1]}, "expected a number of rest_logprobs for each place"),
        ({"top_ids": 3}, "expected lists input_ids, places, top_ids, top_logprobs; threestep/plugins/dist"),
    ],
)
def test_another_form_is_refused_with_its_line(tmp_path, changed: dict, why: str):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, **changed}) + "\n")
    with pytest.raises(ThreestepError, match=f"--distill: .*t.jsonl, line 2: {why}"):
        read_table(path)


def test_no_file_and_no_rows(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.parquet").write_text("{}")
    with pytest.raises(ThreestepError, match="empty.jsonl has no rows"):
        read_table(tmp_path / "empty.jsonl")
    for name in ("bad.parquet", "none.jsonl"):
        with pytest.raises(ThreestepError, match="--distill expects JSON lines or Parquet .*cannot be read"):
            read_table(tmp_path / name)
