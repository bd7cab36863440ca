"""Rows whose prompt is paired with the response of another row, by which KTO estimates how far the policy has moved.

Which row that is depends on the rows alone: neither on batches nor on ranks, epochs or seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from training.utils.contracts.rows import ResponsesRow
    from training.utils.setup.training_run import TrainingRun

_SHUFFLED_BY = 0  # not --seed: the reference's log-probabilities of these rows are found again by another run


class MismatchedRows(Sequence):
    """The rows of a split, each with the response of the row that follows it in one fixed shuffled order, cyclically;
    rows with the same prompt are passed over, unless all have it.

    Worked example, prompts a, b, b, c and the order 2, 0, 1, 3: row 2 (b) takes the response of row 0, row 0 of row 1,
    row 1 (b) of row 3, row 3 of row 2.
    """

    def __init__(self, rows: Sequence[ResponsesRow], most_tokens: int) -> None:
        """most_tokens: of a prompt and its response; a longer response is cut at its end."""
        self._rows, self._most_tokens = rows, most_tokens
        self._order = np.random.RandomState(_SHUFFLED_BY).permutation(len(rows))
        self._place = np.argsort(self._order)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        row = self._rows[index]
        response = self._rows[self.other(int(index))].response_ids[0]
        return replace(row, response_ids=(response[: self._most_tokens - len(row.prompt_ids)],), form=None)

    def other(self, index: int) -> int:
        """The row whose response the row `index` takes."""
        prompt, place = self._rows[index].prompt_ids, int(self._place[index])
        for step in range(1, len(self)):
            other = int(self._order[(place + step) % len(self)])
            if not np.array_equal(self._rows[other].prompt_ids, prompt):
                return other
        return int(self._order[(place + 1) % len(self)])


def mismatched(run: TrainingRun[ResponsesRow], most_tokens: int) -> TrainingRun[ResponsesRow]:
    """The same run on such rows."""
    train, evaluation = (MismatchedRows(rows, most_tokens) for rows in (run.train_rows, run.eval_rows))
    return replace(run, train_rows=train, eval_rows=evaluation)
