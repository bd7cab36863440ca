"""Rows of one kind in an Arrow file, and back by memory map.

Ids are ragged int32 without padding; a row read back is a view of the file. Knows nothing of where files are or when
they are published (see `cache`).

A file holds record batches of `ROWS_PER_BATCH` rows (the last may be shorter), so row i is in batch
i // ROWS_PER_BATCH. Loss masks are stored as spans: (begin, end, begin, end, ...).
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from training.utils.base.storage import HashedFile, share
from training.utils.base.user_files import named_object
from training.utils.contracts.rows import (
    DIGESTS_COLUMN,
    KEY_AT,
    MEDIA_COLUMN,
    SPAN_NUMBERS,
    STORED_MEDIA,
    Row,
    span_numbers,
    spans_of,
)
from training.utils.data.rows.media_store import MediaStore
from training.utils.plugins.registry import added

ROWS_PER_BATCH = 2048

_RECORDS = {record.__name__: record for record in get_args(Row)}
# Of columns; the others have their fields' names.
_OTHER_NAMES = {"loss_mask": "loss_spans", "media": MEDIA_COLUMN, "media_digests": DIGESTS_COLUMN}


def _columns_of(row_type: type[Row]) -> Iterator[tuple[str, str, _Form]]:
    """Yield each field with its column and that one's form. A row's own form has a column for each that plugins add."""
    for field, form in row_type.stored.items():
        if form in _FORMS:
            yield field, _OTHER_NAMES.get(field, field), _FORMS[form]
        else:
            yield from ((field, name, _of_row_form(entry.place)) for name, entry in added("row_forms", ()).items())


def _schema(row_type: type[Row]) -> pa.Schema:
    columns = {column: form.type for _, column, form in _columns_of(row_type)}
    columns = {"row_id": pa.int64(), "length_tokens": pa.int64(), **columns}
    return pa.schema(list(columns.items()), metadata={"rows": row_type.__name__})


@dataclass(frozen=True)
class Written:
    """A manifest's entry for a file of rows."""

    rows: int
    tokens: int
    bytes: int
    sha256: str
    xxh3: str


def write_rows(path: str, row_type: type[Row], rows: Iterable[Row]) -> Written:
    """Write rows of one type to an Arrow file, a batch at a time."""
    waiting = iter(rows)
    taken = iter(lambda: list(islice(waiting, ROWS_PER_BATCH)), [])
    return _write(path, row_type, (_to_batch(row_type, batch) for batch in taken))


def join_files(
    paths: Sequence[str], path: str, row_type: type[Row], new_keys: Mapping[str, np.ndarray] | None = None
) -> Written:
    """Write the rows of several files to one, in order and in new batches: the same rows give the same bytes.

    new_keys: for the path of a file, the keys that the media of its rows get, by their old keys.
    """
    return _write(path, row_type, _cut_anew(paths, new_keys or {}))


def media_keys(path: str) -> np.ndarray:
    """The keys of the media that the rows of a file have, int64, in the order of the rows."""
    held = [_numbers_of_spans(batch)[:, KEY_AT] for batch in _batches([path]) if MEDIA_COLUMN in batch.schema.names]
    return np.concatenate([np.zeros(0, np.int64), *held])


def _numbers_of_spans(batch: pa.RecordBatch) -> np.ndarray:
    """Int64 [media, SPAN_NUMBERS]."""
    return numbers_of(batch.column(MEDIA_COLUMN).values).astype(np.int64).reshape(-1, SPAN_NUMBERS)


def _write(path: str, row_type: type[Row], batches: Iterable[pa.RecordBatch]) -> Written:
    rows = tokens = 0
    with HashedFile(path) as file:
        stream = pa.ipc.new_file(file, _schema(row_type))
        for batch in batches:
            stream.write_batch(batch)
            rows += batch.num_rows
            tokens += int(numbers_of(batch.column("length_tokens")).sum())
        stream.close()  # only here: a file that fails half-way gets no footer
    return Written(rows, tokens, file.size_bytes, file.sha256, file.xxh3)


def _to_batch(row_type: type[Row], rows: list[Any]) -> pa.RecordBatch:
    numbers = [
        _numbers(np.array([getattr(row, name) for row in rows], np.int64)) for name in ("row_id", "length_tokens")
    ]
    columns = [form.write([getattr(row, field) for row in rows]) for field, _, form in _columns_of(row_type)]
    return pa.record_batch([*numbers, *columns], schema=_schema(row_type))


def token_runs(paths: Sequence[str]) -> Iterator[np.ndarray]:
    """The ids of all rows of several files of `TextBlock`, int32, a batch at a time."""
    for batch in _batches(paths):
        yield numbers_of(batch.column("input_ids").values)


def _batches(paths: Sequence[str]) -> Iterator[pa.RecordBatch]:
    for path in paths:
        reader = pa.ipc.open_file(pa.memory_map(path, "r"))
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def _with_keys(path: str, new_keys: np.ndarray | None) -> Iterator[pa.RecordBatch]:
    """The batches of a file, with other keys of their media where there are some."""
    for batch in _batches([path]):
        if new_keys is None:
            yield batch
            continue
        numbers = _numbers_of_spans(batch)
        numbers[:, KEY_AT] = new_keys[numbers[:, KEY_AT]]
        column = pa.ListArray.from_arrays(
            batch.column(MEDIA_COLUMN).offsets, _numbers(numbers.reshape(-1).astype(np.int32))
        )
        yield batch.set_column(batch.schema.get_field_index(MEDIA_COLUMN), MEDIA_COLUMN, column)


def _cut_anew(paths: Sequence[str], new_keys: Mapping[str, np.ndarray]) -> Iterator[pa.RecordBatch]:
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in chain.from_iterable(_with_keys(path, new_keys.get(path)) for path in paths):
        waiting.append(batch)
        rows += batch.num_rows
        if rows >= ROWS_PER_BATCH:
            whole = pa.Table.from_batches(waiting).combine_chunks().to_batches()[0]
            yield _copied(whole.slice(0, ROWS_PER_BATCH))
            waiting = [whole.slice(ROWS_PER_BATCH)]
            rows -= ROWS_PER_BATCH
    if rows:
        yield _copied(pa.Table.from_batches(waiting).combine_chunks().to_batches()[0])


def _copied(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows in new buffers: a slice is written with its neighbours as padding."""
    return batch.take(_numbers(np.arange(batch.num_rows)))


def _numbers(values: np.ndarray) -> pa.Array:
    """The numbers in a column. `pa.array` gives the same, but imports pandas, in every process that builds."""
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def _texts(values: Sequence[str | None]) -> pa.Array:
    """Texts, and nulls for None, in a column; without `pa.array` (see `_numbers`) where they have less than 2 GiB."""
    encoded = [b"" if value is None else value.encode() for value in values]
    if sum(map(len, encoded)) > np.iinfo(np.int32).max:
        return pa.array(values, pa.string())  # raises
    bits = None
    if nulls := sum(value is None for value in values):
        bits = pa.py_buffer(np.packbits([value is not None for value in values], bitorder="little"))
    buffers = [bits, _offsets([len(text) for text in encoded]).buffers()[1], pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers, nulls)


def _offsets(lengths: Sequence[int] | np.ndarray) -> pa.Array:
    return _numbers(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _ragged(arrays: Sequence[np.ndarray], dtype: type = np.int32) -> pa.ListArray:
    values: np.ndarray = np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype, copy=False)
    return pa.ListArray.from_arrays(_offsets([len(array) for array in arrays]), _numbers(values))


def _spans(masks: Sequence[np.ndarray]) -> pa.ListArray:
    """The runs of True in each mask: begin, end, begin, end, ..."""
    gap = np.zeros(1, bool)  # between the masks, so that no run continues into the next
    joined = np.concatenate([gap, *(part for mask in masks for part in (mask, gap))])
    begins = np.concatenate([[0], np.cumsum([len(mask) + 1 for mask in masks])])
    edges = np.flatnonzero(joined[1:] != joined[:-1])
    rows = np.searchsorted(begins, edges, side="right") - 1
    # A mask that is True to its end has an edge at its length, where the gap follows.
    values = (edges - begins[rows]).astype(np.int32)
    return pa.ListArray.from_arrays(_offsets(np.bincount(rows, minlength=len(masks))), _numbers(values))


def numbers_of(numbers: pa.Array) -> np.ndarray:
    """Arrow numbers as a read-only numpy view. `to_numpy` gives the same, but imports pandas: 46 MB and 0.3 s."""
    dtype = np.dtype(numbers.type.to_pandas_dtype())
    if len(numbers) == 0:
        return np.zeros(0, dtype)
    return np.frombuffer(numbers.buffers()[1], dtype, len(numbers), numbers.offset * dtype.itemsize)


class _Ragged:
    """A list column of one batch as numpy views of the memory map; of lists of lists, as tuples of views."""

    def __init__(self, column: pa.ListArray) -> None:
        self._offsets = numbers_of(column.offsets)
        self._values: Any = (
            _Ragged(column.values) if pa.types.is_list(column.type.value_type) else numbers_of(column.values)
        )

    def __getitem__(self, index: int) -> Any:
        begin, end = int(self._offsets[index]), int(self._offsets[index + 1])
        if isinstance(self._values, _Ragged):
            return tuple(self._values[inner] for inner in range(begin, end))
        return self._values[begin:end]


class _Batch:
    """One record batch, its columns by the names of their fields."""

    def __init__(self, batch: pa.RecordBatch, row_type: type[Row]) -> None:
        self.row_ids, self.lengths = numbers_of(batch.column("row_id")), numbers_of(batch.column("length_tokens"))
        self.columns: list[tuple[str, _Form, Any]] = []
        for field, name, form in _columns_of(row_type):
            if name not in batch.schema.names and row_type.stored[field] not in _FORMS:
                continue  # written where no plugin had such a form
            column = batch.column(name)
            self.columns.append((field, form, _Ragged(column) if pa.types.is_list(column.type) else column))

    def fields(self, index: int) -> dict[str, Any]:
        """The fields of a row, by name."""
        tokens = int(self.lengths[index])
        read: dict[str, Any] = {"row_id": int(self.row_ids[index])}
        for field, form, column in self.columns:
            if read.get(field) is None:
                read[field] = form.read(column[index], tokens)
        return read


# Forms of fields.


@dataclass(frozen=True)
class _Form:
    """write: the values of a field -> their column. read: (what is stored, the row's tokens) -> the value."""

    type: pa.DataType
    write: Callable[[list[Any]], pa.Array]
    read: Callable[[Any, int], Any] = lambda stored, tokens: stored


def _of_lists(values: list[Any]) -> pa.ListArray:
    return pa.ListArray.from_arrays(_offsets([len(own) for own in values]), _ragged([i for own in values for i in own]))


def _optional(values: list[Any]) -> pa.ListArray:
    """An empty array means None."""
    none: np.ndarray = np.zeros(0, np.float32)
    return _ragged([none if value is None else np.array(value, np.float32) for value in values], np.float32)


def _mask(spans: np.ndarray, tokens: int) -> np.ndarray:
    mask = np.zeros(tokens, dtype=bool)
    for begin, end in spans.reshape(-1, 2):
        mask[begin:end] = True
    return mask


def _json(default: Any) -> _Form:
    """Values as JSON; null: the default."""

    def write(values: list[Any]) -> pa.Array:
        texts = [None if value == default else json.dumps(value, ensure_ascii=False) for value in values]
        return _texts(texts)

    def read(text: Any, _: int) -> Any:
        value = json.loads(text.as_py()) if text.is_valid else copy(default)
        return value if default is None else type(default)(value)

    return _Form(pa.string(), write, read)


def _of_row_form(place: str) -> _Form:
    """The numbers of `RowForm`s of a class, MODULE:NAME; an empty array means None, or another class."""

    def write(values: list[Any]) -> pa.ListArray:
        there = [value is not None and type(value) is named_object(place) for value in values]
        none: np.ndarray = np.zeros(0, np.int32)
        return _ragged(
            [np.array(value.numbers, np.int32) if own else none for value, own in zip(values, there, strict=True)]
        )

    return _Form(_IDS, write, lambda ids, _: named_object(place)(*ids.tolist()) if len(ids) else None)


_IDS = pa.list_(pa.int32())
_FORMS = {
    "ids": _Form(_IDS, _ragged),
    "lists of ids": _Form(pa.list_(_IDS), _of_lists),
    "numbers or none": _Form(pa.list_(pa.float32()), _optional, lambda numbers, _: numbers if len(numbers) else None),
    "spans": _Form(_IDS, _spans, _mask),
    "media": _Form(_IDS, lambda media: _ragged([span_numbers(each) for each in media]), lambda at, _: spans_of(at)),
    "text": _Form(pa.string(), _texts, lambda text, _: text.as_py()),
    "json": _json(None),
    "json of names": _json({}),
    "json of a list": _json(()),
}


class CachedSplit(Sequence):
    """The rows of one split, read from a memory map.

    Opening reads only the file's footer, and holds a shared lock on the file, so that nobody prunes it. `split[i]` is
    the kind's record (`SentenceRow`, `ResponsesRow`, `PromptRow` or `TextBlock`), whose arrays are read-only views.
    lengths: int64 [rows], the tokens of each row (of ranked responses: prompt and all responses).
    manifest: of the folder that the split is in, as read from JSON.
    A split can be sent to worker processes, which open it anew.
    """

    def __init__(self, path: str, rows: int, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self._rows = rows
        self._in_use = open(path, "rb")  # noqa: SIM115 (as long as this split)
        share(self._in_use)
        self._map = mmap.mmap(self._in_use.fileno(), 0, access=mmap.ACCESS_READ)
        self._reader = pa.ipc.open_file(pa.py_buffer(self._map))
        self._row_type = _RECORDS[self._reader.schema.metadata[b"rows"].decode()]
        self._batches: dict[int, _Batch] = {}
        expected_batches = -(-rows // ROWS_PER_BATCH)
        if self._reader.num_record_batches != expected_batches:
            raise ValueError(
                f"{path}: expected {expected_batches} batches for {rows} rows, got {self._reader.num_record_batches}"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return (CachedSplit, (self.path, self._rows, self.manifest))

    def __len__(self) -> int:
        return self._rows

    @cached_property
    def stored_media(self) -> MediaStore | None:
        """The media of the rows, by key: those of the whole folder; None if it has none."""
        entry = self.manifest.get(STORED_MEDIA)
        return entry and MediaStore(os.path.join(os.path.dirname(self.path), entry["file"]))

    @cached_property
    def lengths(self) -> np.ndarray:
        lengths = np.zeros(self._rows, np.int64)
        for number in range(self._reader.num_record_batches):
            begin = number * ROWS_PER_BATCH
            part = numbers_of(self._reader.get_batch(number).column("length_tokens"))
            lengths[begin : begin + len(part)] = part
            if number % 64 == 63:
                self._forget_pages()
        self._forget_pages()
        lengths.setflags(write=False)
        return lengths

    def values(self, name: str) -> Iterator[Any]:
        """Yield one field of each row that is not of arrays, such as `columns` of prompts, without reading the rest."""
        form = _FORMS[self._row_type.stored[name]]
        for number in range(self._reader.num_record_batches):
            yield from (form.read(value, 0) for value in self._reader.get_batch(number).column(name))
            self._forget_pages()

    def _forget_pages(self) -> None:
        """Give back pages that were needed once; they became resident when they or their neighbours were read."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._rows))]
        position = int(index)
        if position < 0:
            position += self._rows
        if not 0 <= position < self._rows:
            raise IndexError(f"row {index} of {self._rows}")
        number, inside = divmod(position, ROWS_PER_BATCH)
        if number not in self._batches:
            self._batches[number] = _Batch(self._reader.get_batch(number), self._row_type)
        return self._row_type(**self._batches[number].fields(inside))

    def __repr__(self) -> str:
        return f"<{self._rows} {self._row_type.__name__} in {os.path.dirname(self.path)}>"


# Rows that occur more than once.

_ODD = np.uint64(0x9E3779B97F4A7C15)
_OTHER_ODD = np.uint64(0xBF58476D1CE4E5B9)
_ONE, _HALF = np.uint64(1), np.uint64(32)


def row_hashes(path: str) -> np.ndarray:
    """Return a hash of 64 bits of each row's tokens, loss and media, by which rows that repeat others are counted."""
    found = [np.zeros(0, np.uint64)]
    for batch in _batches([path]):
        of_rows = np.zeros(batch.num_rows, np.uint64)
        for place, column in enumerate(column for column in batch.columns if _holds_tokens(column.type)):
            of_rows = _mixed(of_rows + _hashes(column), np.array([place], np.uint64))
        found.append(of_rows)
    return np.concatenate(found)


def _holds_tokens(kind: Any) -> bool:
    """True for lists of whole numbers, and lists of these: what a model is fed of a row."""
    while pa.types.is_list(kind):
        kind = kind.value_type
        if pa.types.is_integer(kind):
            return True
    return False


def _hashes(column: Any) -> np.ndarray:
    """A hash of each value, uint64: of a list's values, in their order, and their number."""
    if not pa.types.is_list(column.type):
        return numbers_of(column).astype(np.int64).view(np.uint64)
    bounds = numbers_of(column.offsets).astype(np.int64)
    begins, lengths = bounds[:-1], np.diff(bounds)
    values = _hashes(column.values.slice(bounds[0], bounds[-1] - bounds[0]))
    places = (np.arange(bounds[0], bounds[-1]) - np.repeat(begins, lengths)).view(np.uint64)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mixed(values, places), dtype=np.uint64)])
    bounds = bounds - bounds[0]
    return _mixed(sums[bounds[1:]] - sums[bounds[:-1]], lengths.view(np.uint64))


def _mixed(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Each value and its place as one number that both change in all bits; uint64 arithmetic wraps."""
    mixed = (values + (places + _ONE) * _ODD) * _OTHER_ODD
    mixed ^= mixed >> _HALF
    mixed *= _ODD
    return mixed ^ (mixed >> _HALF)
