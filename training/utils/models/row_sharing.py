"""Ranks that share rows: which they are, and what readers of a model ask of a rank's part of the rows.

Here each rank has its rows for itself, and its part is the whole. A plugin overrides both (`row_sharing` of
`Plugin.tables`).

N rows, T tokens in a row, L slots of all rows (N x T), l of them this rank's; M positions, m of them this rank's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.utils.base.user_files import named_object
from training.utils.plugins.registry import added, one_at_most

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from training.utils.contracts.token_rows import TokenRows
    from training.utils.flags.added import AddedFlags

ROW_PART = "row_part"  # the keyword that hands a RowPart through a model, where ranks share rows


@dataclass(frozen=True)
class RowSharing:
    """The ranks that share each row. size: so many, with neighbouring numbers. place: this rank's among them. flag: by
    which they do, such as --NAME."""

    size: int = 1
    place: int = 0
    flag: str = ""

    def joined(self, rank: int, world_size: int, timeout_seconds: float = 1800.0) -> RowSharing:
        """Return this with the group of ranks that `rank` belongs to. A collective. timeout_seconds: of the group's
        collectives. ThreestepError for a size that does not divide the ranks."""
        return self

    def part_of(
        self, model: PreTrainedModel, rows: TokenRows, inputs: dict[str, Any]
    ) -> tuple[dict[str, Any], RowPart]:
        """Return the arguments of the forward of `model` for this rank's part of `rows`, and the part. inputs: those
        for whole rows"""
        return inputs, WHOLE_ROWS

    def check_ranks(self, ranks: int) -> None:
        """Raise ThreestepError if the groups do not divide the number of ranks."""

    def check_model(self, model: PreTrainedModel, longest_tokens: int) -> None:
        """ThreestepError if the ranks of a group cannot share rows of a transformers model. longest_tokens: of the
        sequences"""

    def sizes_for(self, model: PreTrainedModel, ranks: int, longest_tokens: int) -> list[int]:
        """Return in ascending order how many of `ranks` can share a row of a transformers model; 1 always can."""
        return [1]


ALONE = RowSharing()


class OwnPositions:
    """Those of some positions in whole rows that are in this rank's part: here all. local_m: int64, flat, in the
    part."""

    def __init__(self, local_m: torch.Tensor) -> None:
        self.local_m = local_m

    def of(self, values_M: torch.Tensor) -> torch.Tensor:
        """Return those at this rank's positions."""
        return values_M

    def whole(self, values_m: torch.Tensor) -> torch.Tensor:
        """Return [M] or [M, ...] of all positions, the same on every rank that shares the rows, of those at this
        rank's. The gradient reaches these alone. A collective."""
        return values_m


class RowPart:
    """This rank's part of the rows of a micro-batch: here whole rows."""

    @property
    def sharing(self) -> RowSharing:
        """The ranks that have the other parts."""
        return ALONE

    def cut_slots(self, slots_L: torch.Tensor, filling: int = 0) -> torch.Tensor:
        """Return this rank's [l] or [l, ...] of the slots of all rows. filling: where no row has a slot"""
        return slots_L

    def whole_slots(self, slots_l: torch.Tensor) -> torch.Tensor:
        """Return [L] or [L, ...] whole numbers of all rows, of this rank's; without gradients. A collective."""
        return slots_l

    def moved(self, states_lH: torch.Tensor, from_L: torch.Tensor) -> torch.Tensor:
        """Return [l, H], for each of this rank's slots the states of the slot that `from_L`, int64 [L], names for it,
        which another rank may hold. A collective, in the backward too."""
        return states_lH.index_select(0, from_L)

    def owned(self, positions_M: torch.Tensor) -> OwnPositions:
        """Return which of some flat positions n*T+i of whole rows are this rank's."""
        return OwnPositions(positions_M)


WHOLE_ROWS = RowPart()


def row_sharing(flags: AddedFlags) -> RowSharing:
    """Return the ranks that share each row, as a plugin's flag asks. ThreestepError for two flags that do."""
    known: list[RowSharing] = [named_object(place)(flags) for place in added("row_sharing", ()).values()]
    sharing = ((each.flag, each) for each in known if each.size > 1)
    found = one_at_most(sharing, "ranks can share rows in only one way", "each set one")
    return found or next(iter(known), ALONE)
