"""The likeliest tokens of a file, which a teacher may write first. n beginnings, k tokens after each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from threestep.plugins.distillation.file import keys_of_row, read_table, write_table
from threestep.plugins.distillation.settings import FILE_FLAG, MODEL_FLAG
from threestep.plugins.distillation.top_tokens import TopTable, keys_of_rows
from training.utils.base.console import counted, log
from training.utils.base.errors import ThreestepError
from training.utils.engine.ranks.collectives import from_main, gathered, on_main

if TYPE_CHECKING:
    from threestep.plugins.distillation.teacher import Teacher
    from threestep.plugins.distillation.top_tokens import TopTokens
    from training.utils.contracts.guests import LayOut
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.engine.ranks.startup import Ranks


class FileTeacher:
    """The table of a file. teacher: writes the file where there is none; None: it has to be there."""

    def __init__(self, path: Path, teacher: Teacher | None, ranks: Ranks) -> None:
        self._path, self._teacher, self._ranks = path, teacher, ranks
        self._table: TopTable | None = None

    def top_tokens(self, rows: TokenRows) -> TopTokens | None:
        """Return what follows each different target's beginning; None while the file is written."""
        return None if self._table is None else self._table.of(keys_of_rows(rows))

    def open(self, splits: Sequence[Sequence[Any]], lay_out: LayOut) -> None:
        """Read the file, or have the teacher write it; ThreestepError for a row that it lacks. A collective."""
        if self._teacher is not None and not from_main(self._path.exists() if self._ranks.is_main else None):
            self._table = self._read(self._teacher, splits, lay_out)
            table, rows = self._table, [row for split in splits for row in split]
            on_main(lambda: write_table(self._path, rows, table), self._ranks.is_main)
            log(
                f"teacher: wrote {len(table):,} positions of {counted(len(rows), 'row')} to {self._path}",
                self._ranks.is_main,
            )
        else:
            self._table = read_table(self._path)
        self._teacher = None
        for row in (row for split in splits for row in split):
            if self._table.lacks(keys_of_row(row)):
                raise ThreestepError(
                    f"{FILE_FLAG}: {self._path} lacks row {row.row_id} of the data, or has it tokenized differently; "
                    f"recreate the file with the data, lengths, chat template and tokenizer of this run ({MODEL_FLAG})"
                )

    def _read(self, teacher: Teacher, splits: Sequence[Sequence[Any]], lay_out: LayOut) -> TopTable:
        keys: list[int] = []
        parts: list[list[np.ndarray]] = []
        for split in splits:
            for rows in lay_out(split):
                top = teacher.top_tokens(rows)
                own = keys_of_rows(rows), [part.cpu().numpy() for part in top]
                for their_keys, numbers in gathered(own):
                    keys += their_keys
                    parts.append(numbers)
        ids_nk, logprobs_nk, rest_n = (np.concatenate(column) for column in zip(*parts, strict=True))
        return TopTable(keys, ids_nk.astype(np.int32), logprobs_nk, rest_n)
