"""Rows of a file that have the tokens of an earlier one, counted by a hash of 64 bits a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from training.utils.data.rows.dataset import numbers_of

_ODD = np.uint64(0x9E3779B97F4A7C15)
_OTHER_ODD = np.uint64(0xBF58476D1CE4E5B9)
_ONE, _HALF = np.uint64(1), np.uint64(32)


def count_duplicates(path: str) -> int:
    """Number of rows of an Arrow file that repeat an earlier row's tokens, loss and media."""
    found = [np.zeros(0, np.uint64)]
    with pa.memory_map(path, "r") as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            of_rows = np.zeros(batch.num_rows, np.uint64)
            for place, column in enumerate(column for column in batch.columns if _holds_tokens(column.type)):
                of_rows = _mixed(of_rows + _hashes(column), np.array([place], np.uint64))
            found.append(of_rows)
    hashes = np.concatenate(found)
    return len(hashes) - len(np.unique(hashes))


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
