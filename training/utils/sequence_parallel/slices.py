"""Slices of rows over the ranks of a sequence group, and what belongs to a slice.

Rank r has tokens [r * t, (r + 1) * t) of every row. A target belongs to the rank whose slice has the token that
predicts it: a shared prompt's last token predicts the first token of every response.

N rows, T tokens in a row, P ranks of the group, t = ceil(T / P), M positions, m of them in this rank's slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from training.utils.sequence_parallel.exchange import summed_over_group

if TYPE_CHECKING:
    from training.utils.sequence_parallel.group import SequenceGroup

ROW_SLICE = "row_slice"  # the keyword that hands a RowSlice through a model to its attention


@dataclass(frozen=True)
class RowSlice:
    """This rank's slices of a micro-batch. width: T. mask: what attention of whole rows takes as one, or None."""

    group: SequenceGroup
    width: int
    mask: Any = None

    @property
    def length(self) -> int:
        """t."""
        return -(-self.width // self.group.size)

    def cut(self, part_NT: torch.Tensor) -> torch.Tensor:
        """Return this rank's [N, t] or [N, t, ...] of whole rows. What fills the last slice is 0."""
        missing = self.length * self.group.size - self.width
        filled = functional.pad(part_NT, (0, 0) * (part_NT.dim() - 2) + (0, missing)) if missing else part_NT
        return filled.narrow(1, self.group.place * self.length, self.length)

    def owned(self, positions_M: torch.Tensor) -> OwnedPositions:
        """Return which of some flat positions n*T+i of whole rows are in this rank's slices. A wait for the device."""
        row_M, place_M = positions_M // self.width, positions_M % self.width
        which_m = (place_M // self.length == self.group.place).nonzero().flatten()
        local_M = row_M * self.length + place_M - self.group.place * self.length
        return OwnedPositions(self.group, which_m, local_M[which_m], len(positions_M))


@dataclass(frozen=True)
class OwnedPositions:
    """Positions in this rank's slices. which_m: int64, which of all `count` they are. local_m: int64, flat positions
    n*t+i in the slices."""

    group: SequenceGroup
    which_m: torch.Tensor
    local_m: torch.Tensor
    count: int

    def whole(self, values_m: torch.Tensor) -> torch.Tensor:
        """Return [M] or [M, ...] of all positions, the same on every rank of the group, of this rank's numbers at its
        own. The gradient reaches these alone."""
        nothing = values_m.new_zeros(self.count, *values_m.shape[1:])
        return summed_over_group(nothing.index_copy(0, self.which_m, values_m), self.group)


def sliced_inputs(inputs: Mapping[str, Any], group: SequenceGroup) -> tuple[dict[str, Any], RowSlice]:
    """Return the arguments of a transformers model's forward for this rank's slices of the rows that `inputs` holds
    whole, and the slices. Positions stay those in the row, and what attention takes stays whole."""
    names = [name for name in ("input_ids", "inputs_embeds", "position_ids") if name in inputs]
    count, width = inputs[names[0]].shape[:2]
    part = RowSlice(group, width, inputs["attention_mask"])
    # transformers passes a given mask through; this one, of one byte, nothing reads.
    unread = torch.zeros((), dtype=torch.bool, device=inputs[names[0]].device)
    mask = unread.expand(count, 1, part.length, part.length)
    cut = {name: part.cut(inputs[name]) for name in names}
    return {**inputs, **cut, "attention_mask": mask, ROW_SLICE: part}, part
