"""The order in which the rows of a dataset are taken, as a pure function of (rows, seed).

Epochs follow each other without a gap: an optimizer step takes the next G rows of the endless stream of shuffled
epochs, so that every step has exactly G, and where a run stands is one number.
"""

from __future__ import annotations

import numpy as np


class ShuffledStream:
    """Epoch after epoch of `rows` row numbers, each epoch in an order of its own."""

    def __init__(self, rows: int, seed: int, shuffle: bool = True) -> None:
        if rows <= 0:
            raise AssertionError("a stream needs at least one row")
        self.rows = rows
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def take(self, start: int, count: int) -> list[int]:
        """Return the row numbers at stream positions start .. start + count - 1."""
        taken = []
        for position in range(start, start + count):
            epoch, offset = divmod(position, self.rows)
            if epoch != self._epoch:
                self._epoch, self._order = epoch, self._epoch_order(epoch)
            taken.append(int(self._order[offset]))
        return taken

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.rows)
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.rows)


def steps_in(rows: int, epochs: float, sequences_per_step: int) -> int:
    """Whole optimizer steps in `epochs` passes over `rows` rows."""
    return int(rows * epochs + 1e-6) // sequences_per_step  # 100 rows x 0.29 epochs is 28.999999999999996 in binary
