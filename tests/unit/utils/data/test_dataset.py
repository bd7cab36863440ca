"""Rows written to Arrow come back the same, by memory map, whatever the batch they are in."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from training.utils.data import dataset
from training.utils.data.dataset import CachedSplit, SplitWriter
from training.utils.data.phases import PromptRow, ResponsesRow, SentenceRow, TextBlock


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def sentence(row: int) -> SentenceRow:
    mask = np.array([False, row % 2 == 1, False, True, True])
    return SentenceRow(row, ids(row, 1, 2, 3, 0)[: 3 + row % 3], mask[: 3 + row % 3])


MAKERS = {
    SentenceRow: sentence,
    ResponsesRow: lambda row: ResponsesRow(
        row,
        ids(*range(row % 4 + 1)),
        tuple(ids(*range(n + 1)) for n in range(2 + row % 3)),
        np.arange(1 + row % 3, dtype=np.float32) / 7 if row % 4 else None,
    ),
    PromptRow: lambda row: PromptRow(
        row, ids(*range(row % 4 + 1)), f"é{row}", [None, "18", {"a": [1, 2.5]}, "", 0][row % 5]
    ),
    TextBlock: lambda row: TextBlock(row, ids(row, row)),
}


def write(path, rows):
    with SplitWriter(str(path), type(rows[0]) if rows else TextBlock) as writer:
        for row in rows:
            writer.append(row)
    return CachedSplit(str(path), writer.rows, {"some": "manifest"})


def same(left, right):
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.tolist() == right.tolist()
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right and type(left) is type(right)


@pytest.mark.parametrize("row_type", MAKERS, ids=lambda row_type: row_type.__name__)
@pytest.mark.parametrize("count", [1, 4, 5, 13])
def test_rows_come_back_the_same(tmp_path, monkeypatch, row_type, count):
    monkeypatch.setattr(dataset, "ROWS_PER_BATCH", 4)
    rows = [MAKERS[row_type](row) for row in range(count)]
    split = write(tmp_path / "split.arrow", rows)
    assert len(split) == count and split.manifest == {"some": "manifest"}
    for index in [*range(count), -1]:
        for name, value in vars(rows[index]).items():
            assert same(value, getattr(split[index], name)), (index, name)
    assert split.lengths.dtype == np.int64
    assert split.lengths.tolist() == [row.length_tokens for row in rows]
    assert [row.row_id for row in split] == list(range(count))
    assert [row.row_id for row in split[1:3]] == list(range(count))[1:3]


def test_beyond_the_end(tmp_path):
    split = write(tmp_path / "split.arrow", [TextBlock(0, ids(1))])
    for index in (1, -2):
        with pytest.raises(IndexError, match="of 1"):
            split[index]


def test_no_rows_at_all(tmp_path):
    split = write(tmp_path / "split.arrow", [])
    assert len(split) == 0 and list(split) == [] and split.lengths.tolist() == []


def test_opening_reads_no_row(tmp_path, monkeypatch):
    rows = [TextBlock(row, ids(row)) for row in range(10)]
    path = tmp_path / "split.arrow"
    write(path, rows)
    read = []
    monkeypatch.setattr(dataset, "_Batch", lambda batch: read.append(batch))
    split = CachedSplit(str(path), 10, {})
    split.lengths  # noqa: B018 (a property that reads lengths alone)
    assert read == []


def test_arrays_are_views_of_the_file(tmp_path):
    split = write(tmp_path / "split.arrow", [TextBlock(0, ids(1, 2))])
    assert not split[0].input_ids.flags.owndata and not split[0].input_ids.flags.writeable


def test_a_split_opens_again_in_another_process(tmp_path):
    split = write(tmp_path / "split.arrow", [TextBlock(7, ids(1, 2))])
    again = pickle.loads(pickle.dumps(split))
    assert again[0].row_id == 7 and again.manifest == split.manifest


def test_ids_are_ragged_and_four_bytes_each(tmp_path):
    # DeepSpeed-Chat's cache takes 23 kB a row at length 512, whatever the row's own length.
    path = tmp_path / "split.arrow"
    count, tokens = 4000, 20
    write(
        path,
        [SentenceRow(row, np.arange(tokens, dtype=np.int32), np.ones(tokens, bool)) for row in range(count)],
    )
    assert path.stat().st_size < count * (tokens * 4 + 40)


def test_a_file_with_fewer_rows_than_said(tmp_path):
    path = tmp_path / "split.arrow"
    write(path, [TextBlock(0, ids(1))])
    with pytest.raises(ValueError, match="1 batches where 5000 rows need 3"):
        CachedSplit(str(path), 5000, {})
