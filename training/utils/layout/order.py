"""The order of a dataset's rows in training, as a pure function of (rows, seed).

Epochs follow each other without a gap: each optimizer step takes the next G rows of an endless stream of epochs, so
that every step has exactly G, and the position of a run is one number.
"""

from __future__ import annotations

import math
import sys

import numpy as np

MOST_EVALUATIONS = 10  # of a run that is not told when to evaluate, besides the one before training


class ShuffledStream:
    """An endless stream of epochs of `rows` row numbers, each in its own order; all ascending if not `shuffled`."""

    def __init__(self, rows: int, seed: int, shuffled: bool = True) -> None:
        if rows <= 0:
            raise AssertionError("a stream needs at least one row")
        self.rows = rows
        self.seed = seed
        self.shuffled = shuffled
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def take(self, start: int, count: int) -> list[int]:
        """Return the row numbers at stream positions start .. start + count - 1."""
        taken = []
        for position in range(start, start + count):
            epoch, offset = divmod(position, self.rows)
            if epoch != self._epoch:
                generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
                self._epoch = epoch
                self._order = generator.permutation(self.rows) if self.shuffled else np.arange(self.rows)
            taken.append(int(self._order[offset]))
        return taken


def steps_in(rows: int, epochs: float, sequences_per_step: int) -> int:
    """Return the whole optimizer steps in `epochs` passes over `rows` rows; sys.maxsize for infinitely many."""
    if math.isinf(epochs):
        return sys.maxsize
    return int(rows * epochs + 1e-6) // sequences_per_step  # 100 rows x 0.29 epochs is 28.999999999999996 in binary


def completes_epochs(step: int, epochs: float, steps_per_epoch: float) -> bool:
    """True if `step`, from 1 on, is the first after which another `epochs` passes over the rows are complete; never for
    0 epochs. steps_per_epoch: optimizer steps, not rounded"""
    if epochs <= 0 or steps_per_epoch <= 0:
        return False
    every = epochs * steps_per_epoch
    return int(step / every + 1e-6) > int((step - 1) / every + 1e-6)


def evaluates_by_default(step: int, total_steps: int, trained_rows: int, eval_rows: int) -> bool:
    """Return True if a run evaluates after `step`, from 1 on, where no flag says when: at `MOST_EVALUATIONS` evenly
    spaced steps, or at fewer if these would read more rows than training does; always after the last step.

    trained_rows: that the whole run trains on, each as often as it does
    """
    count = max(1, min(MOST_EVALUATIONS, trained_rows // max(eval_rows, 1)))
    return step * count // total_steps > (step - 1) * count // total_steps
