"""A teacher writes the file once; a file that lacks a row of the run is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from threestep.plugins.distillation.file import write_table
from threestep.plugins.distillation.stored import FileTeacher
from threestep.plugins.distillation.tests.test_file import ROWS, table
from training.utils.base.errors import ThreestepError
from training.utils.data.rows.documents import sentence_document
from training.utils.layout.rows import packed_rows

RANKS: Any = SimpleNamespace(is_main=True)


def lay_out(rows: Any) -> Any:
    return [packed_rows([[sentence_document(row)] for row in rows], 0, with_before=True)]


def test_a_file_is_written_once_and_found_again(tmp_path):
    asked = []

    class StandIn:
        def top_tokens(self, rows: Any) -> Any:
            asked.append(rows)
            return table().of([key for row in ROWS for key in keys(row)])

    from threestep.plugins.distillation.file import keys_of_row as keys

    path = tmp_path / "t.jsonl"
    first = FileTeacher(path, StandIn(), RANKS)
    [rows] = lay_out(ROWS)
    assert first.top_tokens(rows) is None  # while it is laid out for the teacher
    first.open([ROWS, []], lambda split: lay_out(split) if split else [])
    second = FileTeacher(path, StandIn(), RANKS)
    second.open([ROWS], lay_out)
    assert len(asked) == 1
    for own, theirs in zip(first.top_tokens(rows), second.top_tokens(rows), strict=True):
        torch.testing.assert_close(own, theirs)


def test_a_row_that_the_file_lacks(tmp_path):
    write_table(tmp_path / "t.jsonl", ROWS[:1], table())
    told = "--distill: .*t.jsonl lacks row 1 of the data, .*[(]--teacher_model_name_or_path[)]"
    with pytest.raises(ThreestepError, match=told):
        FileTeacher(tmp_path / "t.jsonl", None, RANKS).open([ROWS], lay_out)
