"""Rows shared by a group of ranks, as the core asks for them (`models.row_sharing`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from threestep.plugins.long_rows import checks
from threestep.plugins.long_rows.arguments import LongRowsArguments
from threestep.plugins.long_rows.attention import slice_attention
from threestep.plugins.long_rows.group import SequenceGroup
from threestep.plugins.long_rows.slices import RowSlice, cut_by, sliced_inputs
from training.utils.models.attention import text_attention
from training.utils.models.families import language_part
from training.utils.models.row_sharing import ROW_PART, RowPart

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.token_rows import TokenRows
    from training.utils.flags.added import AddedFlags


def asked(flags: AddedFlags) -> SharedRows:
    """Return who shares each row as --sequence_parallel_size says."""
    return SharedRows(flags.of(LongRowsArguments).sequence_parallel_size)


class SharedRows(SequenceGroup):
    """A group whose ranks compute slices of rows."""

    def part_of(
        self, model: PreTrainedModel, rows: TokenRows, inputs: dict[str, Any]
    ) -> tuple[dict[str, Any], RowPart]:
        """See `RowSharing.part_of`."""
        slice_attention(text_attention(model))
        if rows.media is None:
            return sliced_inputs(inputs, self)
        cut_by(language_part(model))
        part = RowSlice(self, inputs["input_ids"].shape[1], inputs["attention_mask"], at_language=True)
        return {**inputs, ROW_PART: part}, part

    def check_model(self, model: PreTrainedModel, longest_tokens: int) -> None:
        """See `RowSharing.check_model`."""
        checks.check_model(model, self.size, longest_tokens)

    def sizes_for(self, model: PreTrainedModel, ranks: int, longest_tokens: int) -> list[int]:
        """See `RowSharing.sizes_for`."""
        return checks.sizes_for(model, ranks, longest_tokens)
