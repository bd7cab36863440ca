"""Rows written to Arrow come back the same, by memory map, whatever the batch they are in."""

from __future__ import annotations

import hashlib
import pickle
import random
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.utils.base.storage import lock_exclusively
from training.utils.contracts.rows import PromptRow, ResponsesRow, SentenceRow, TextBlock
from training.utils.data.rows import dataset
from training.utils.data.rows.dataset import CachedSplit, join_files, row_hashes, token_runs, write_rows
from training.utils.plugins.plugin import RowFormEntry


class Four(NamedTuple):
    """A form of rows of four numbers."""

    one: int
    two: int
    three: int
    four: int

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(self)


class Five(NamedTuple):
    """Another form."""

    number: int

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.number,)


@pytest.fixture(autouse=True)
def forms(monkeypatch) -> dict[str, RowFormEntry]:
    """The forms of rows that plugins add: these two."""
    found = {each.__name__.lower(): RowFormEntry(f"{__name__}:{each.__name__}", "") for each in (Four, Five)}
    monkeypatch.setattr(dataset, "added", lambda table, known: found)
    return found


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def sentence(row: int) -> SentenceRow:
    mask = np.array([False, row % 2 == 1, False, True, True])
    form = (None, Four(3, 4, 5, 6), Five(9), Four(3, 4, 5, 6))[row % 4]
    return SentenceRow(row, ids(row, 1, 2, 3, 0)[: 3 + row % 3], mask[: 3 + row % 3], form)


MAKERS = {
    SentenceRow: sentence,
    ResponsesRow: lambda row: ResponsesRow(
        row,
        ids(*range(row % 4 + 1)),
        tuple(ids(*range(n + 1)) for n in range(2 + row % 3)),
        np.arange(1 + row % 3, dtype=np.float32) / 7 if row % 4 else None,
        None if row % 3 else Four(6, 5, 4, 3),
    ),
    PromptRow: lambda row: PromptRow(
        row,
        ids(*range(row % 4 + 1)),
        f"é{row}",
        [None, "18", {"a": [1, 2.5]}, "", 0][row % 5],
        [{}, {"é": None}, {"info": {"index": row, "kinds": ["a", 1.5]}}][row % 3],
    ),
    TextBlock: lambda row: TextBlock(row, ids(row, row)),
}


def write(path, rows):
    written = write_rows(str(path), type(rows[0]) if rows else TextBlock, rows)
    return CachedSplit(str(path), written.rows, {"some": "manifest"})


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
    for beyond in (count, -count - 1):
        with pytest.raises(IndexError, match=f"of {count}"):
            split[beyond]


def test_rows_that_were_written_without_a_form_are_read_where_there_is_one(tmp_path, forms):
    rows = [SentenceRow(row, ids(1, 2), np.array([False, True])) for row in range(3)]
    added = dict(forms)
    forms.clear()
    split = write(tmp_path / "split.arrow", rows)
    forms.update(added)
    assert [row.form for row in split] == [None] * 3


def test_a_split_is_a_view_of_its_file_and_opens_again_in_another_process(tmp_path):
    path = tmp_path / "split.arrow"
    split = write(path, [TextBlock(7, ids(1, 2))])
    assert not split[0].input_ids.flags.owndata and not split[0].input_ids.flags.writeable
    again = pickle.loads(pickle.dumps(split))
    assert again[0].row_id == 7 and again.manifest == split.manifest
    with pytest.raises(ValueError, match="expected 3 batches for 5000 rows, got 1"):
        CachedSplit(str(path), 5000, {})  # fewer rows than said


def test_no_rows_at_all(tmp_path):
    split = write(tmp_path / "split.arrow", [])
    assert len(split) == 0 and list(split) == [] and split.lengths.tolist() == []
    assert (
        join_files([], str(tmp_path / "joined"), TextBlock).rows
        == len(CachedSplit(str(tmp_path / "joined"), 0, {}))
        == 0
    )


def test_opening_reads_no_row(tmp_path, monkeypatch):
    rows = [TextBlock(row, ids(row)) for row in range(10)]
    path = tmp_path / "split.arrow"
    write(path, rows)
    read = []
    monkeypatch.setattr(dataset, "_Batch", lambda batch: read.append(batch))
    split = CachedSplit(str(path), 10, {})
    split.lengths  # noqa: B018 (a property that reads lengths alone)
    assert read == []


def test_ids_are_ragged_and_four_bytes_each(tmp_path):
    # DeepSpeed-Chat's cache takes 23 kB a row at length 512, whatever the row's own length.
    path = tmp_path / "split.arrow"
    count, tokens = 4000, 20
    write(path, [SentenceRow(row, np.arange(tokens, dtype=np.int32), np.ones(tokens, bool)) for row in range(count)])
    assert path.stat().st_size < count * (tokens * 4 + 48)


@pytest.mark.parametrize("row_type", MAKERS, ids=lambda row_type: row_type.__name__)
def test_joined_files_have_the_same_bytes_however_the_rows_were_cut(tmp_path, monkeypatch, row_type):
    monkeypatch.setattr(dataset, "ROWS_PER_BATCH", 4)
    rows = [MAKERS[row_type](row) for row in range(23)]
    found = []
    for cuts in ([0, 23], [0, 4, 8, 23], [0, 1, 1, 7, 19, 23], [*range(24)]):
        paths = [str(tmp_path / f"{begin}-{end}") for begin, end in zip(cuts, cuts[1:], strict=False)]
        for path, begin, end in zip(paths, cuts, cuts[1:], strict=False):
            assert write_rows(path, row_type, rows[begin:end]).bytes == Path(path).stat().st_size
        written = join_files(paths, str(tmp_path / "joined"), row_type)
        found.append((tmp_path / "joined").read_bytes())
        assert (written.rows, written.bytes) == (23, len(found[-1]))
        assert written.tokens == sum(row.length_tokens for row in rows)
        assert written.sha256 == hashlib.sha256(found[-1]).hexdigest()
    assert len(set(found)) == 1
    split = CachedSplit(str(tmp_path / "joined"), 23, {})
    for index, row in enumerate(rows):
        assert all(same(value, getattr(split[index], name)) for name, value in vars(row).items())


def test_the_ids_of_several_files_in_a_row(tmp_path):
    for name, rows in (("a", [ids(1, 2), ids(3)]), ("b", []), ("c", [ids(4)])):
        write(tmp_path / name, [TextBlock(0, each) for each in rows])
    runs = list(token_runs([str(tmp_path / name) for name in "abc"]))
    assert np.concatenate(runs).tolist() == [1, 2, 3, 4] and runs[0].dtype == np.int32


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.booleans()), min_size=1, max_size=6))
def test_spans_are_the_runs_of_true(masks):
    spans = dataset._spans([np.array(mask, bool) for mask in masks]).to_pylist()
    for mask, flat in zip(masks, spans, strict=True):
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        assert [any(begin <= place < end for begin, end in pairs) for place in range(len(mask))] == mask
        # each as long as it can be: two runs do not touch
        assert all(begin < end for begin, end in pairs)
        assert all(left[1] < right[0] for left, right in zip(pairs, pairs[1:], strict=False))


def test_an_open_split_is_not_another_ones_own(tmp_path):
    path = str(tmp_path / "split")
    opened = write(path, [TextBlock(0, ids(1))])
    with ExitStack() as held:
        assert not lock_exclusively(path, held)
    del opened
    with ExitStack() as held:
        assert lock_exclusively(path, held) and lock_exclusively(str(tmp_path / "missing"), held)


def test_what_fails_half_way_is_closed_and_no_split(tmp_path):
    path = tmp_path / "split"

    def rows():
        yield TextBlock(0, ids(1))
        raise KeyError

    with pytest.raises(KeyError):
        write_rows(str(path), TextBlock, rows())
    with pytest.raises((OSError, ValueError)):
        CachedSplit(str(path), 1, {})


@pytest.mark.parametrize("texts", [[], ["a"], [None], ["", "é\u4e2d", None, "b" * 99, None], ["x"] * 9, [None] * 17])
def test_texts_and_numbers_are_stored_as_arrow_stores_them(texts):
    column, plain = dataset._texts(texts), dataset.pa.array(texts, dataset.pa.string())
    column.validate(full=True)
    assert column.equals(plain) and column.null_count == plain.null_count
    for dtype in (np.int32, np.int64, np.float32):
        numbers = np.array([3, -1, 0], dtype)
        assert dataset._numbers(numbers).equals(dataset.pa.array(numbers))


def drawn_ids(dice, most):
    return np.array([dice.randrange(2) for _ in range(dice.randrange(most))], np.int32)


def a_sentence(dice, place):
    input_ids = np.array([7, *drawn_ids(dice, 6)], np.int32)
    mask = np.arange(len(input_ids)) > dice.randrange(2)
    return SentenceRow(place, input_ids, mask), (tuple(input_ids), tuple(mask))


def pair(dice, place):
    prompt, *responses = (drawn_ids(dice, 3) for _ in range(3))
    row = ResponsesRow(place, prompt, tuple(responses))
    return row, (tuple(prompt), *map(tuple, responses))


def prompt(dice, place):
    flipped = drawn_ids(dice, 7)
    return PromptRow(place, flipped, "text", None), tuple(flipped)


@pytest.mark.parametrize("make", [a_sentence, pair, prompt])
@pytest.mark.parametrize("rows", [0, 1, 300, 5000])
def test_as_a_set_counts_them(make, rows, tmp_path):
    dice = random.Random(rows)
    made = [make(dice, place) for place in range(rows)]
    kind = type(made[0][0]) if made else SentenceRow
    write_rows(str(tmp_path / "rows.arrow"), kind, [row for row, _ in made])
    hashes = row_hashes(str(tmp_path / "rows.arrow"))
    assert len(hashes) == rows and len(np.unique(hashes)) == len({value for _, value in made})
