"""Rows of a file that have the tokens of an earlier one, counted by a hash of 64 bits a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

# Columns whose equality makes two rows the same to a model.
_TOKENS = ("input_ids", "loss_spans", "prompt_ids", "response_ids", "flipped_prompt_ids", "images")
_ODD = np.uint64(0x9E3779B97F4A7C15)
_OTHER_ODD = np.uint64(0xBF58476D1CE4E5B9)
_HALF = np.uint64(32)


def count_duplicates(path: str) -> int:
    """Number of rows of an Arrow file that repeat an earlier row's tokens, loss and media."""
    found = [np.zeros(0, np.uint64)]
    with pa.memory_map(path, "r") as file:
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            of_rows = np.zeros(batch.num_rows, np.uint64)
            for place, name in enumerate(name for name in _TOKENS if name in batch.schema.names):
                of_rows = _mixed(of_rows + _hashes(batch.column(name)), np.uint64(place + 1))
            found.append(of_rows)
    hashes = np.concatenate(found)
    return len(hashes) - len(np.unique(hashes))


def _hashes(column: Any) -> np.ndarray:
    """A hash of each value, uint64: of a list's values, in their order, and their number."""
    if not pa.types.is_list(column.type) and not pa.types.is_large_list(column.type):
        return column.to_numpy(zero_copy_only=False).astype(np.int64).view(np.uint64)
    bounds = column.offsets.to_numpy().astype(np.int64)
    begins, lengths = bounds[:-1], np.diff(bounds)
    values = _hashes(column.values.slice(bounds[0], bounds[-1] - bounds[0]))
    places = (np.arange(bounds[0], bounds[-1]) - np.repeat(begins, lengths)).view(np.uint64)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_mixed(values, places), dtype=np.uint64)])
    bounds = bounds - bounds[0]
    return _mixed(sums[bounds[1:]] - sums[bounds[:-1]], lengths.view(np.uint64))


def _mixed(values: np.ndarray, places: Any) -> np.ndarray:
    """Each value and its place as one number that both change in all bits; uint64 arithmetic wraps."""
    mixed = (values + (places + np.uint64(1)) * _ODD) * _OTHER_ODD
    mixed ^= mixed >> _HALF
    mixed *= _ODD
    return mixed ^ (mixed >> _HALF)
