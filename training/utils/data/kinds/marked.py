"""Responses that are marked one by one: a prompt with a response that is good or bad."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from training.utils.contracts.rows import MarkedRow
from training.utils.data.kinds.ranked import Ranked

if TYPE_CHECKING:
    from training.utils.data.kinds.strategies import ReadSample
    from training.utils.data.sources.raw_dataset import PromptRawDataset


class Marked(Ranked):
    """`MarkedRow`s, for preference losses on unpaired responses."""

    name = "marked"
    key = "2_marked"
    record = MarkedRow
    responses: ClassVar[tuple[str, ...]] = ("chosen",)
    dropped_marks = {None: "unmarked"}
    columns: ClassVar[tuple[str, ...]] = ()
    hints = {
        "unmarked": "each response needs a mark of its own, good or bad (of files, --label_column names the column); a "
        "pair is written as two rows"
    }
    loss = "the responses, good ones and bad ones"

    def responses_of(self, mark: bool | None) -> tuple[str, ...]:
        return ("chosen",) if mark else ("rejected",)

    def carried(self, raw: PromptRawDataset, sample: Any, read: ReadSample, source: str) -> dict[str, Any]:
        return {"is_good": raw.get_mark(sample)}
