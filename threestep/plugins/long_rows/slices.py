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

from threestep.plugins.long_rows.exchange import brought_to_group, summed_over_group
from training.utils.base.errors import ThreestepError
from training.utils.models.row_sharing import ROW_PART, OwnPositions, RowPart

if TYPE_CHECKING:
    from threestep.plugins.long_rows.group import SequenceGroup

_CUTS = "_threestep_cuts_rows"  # of a language model
_CUT_ARGUMENTS = ("inputs_embeds", "position_ids", "attention_mask", "visual_pos_masks")


@dataclass(frozen=True)
class RowSlice(RowPart):
    """This rank's slices of a micro-batch. width: T. mask: what attention of whole rows takes as one, or None.
    at_language: a model of media beside text gets whole rows, and its language model cuts them (`cut_by`)."""

    group: SequenceGroup
    width: int
    mask: Any = None
    at_language: bool = False

    @property
    def sharing(self) -> SequenceGroup:
        return self.group

    @property
    def length(self) -> int:
        """t."""
        return -(-self.width // self.group.size)

    def mask_of_layer(self, window: int | None, device: torch.device) -> Any:
        """Return `mask` of a layer that looks back so many tokens; None: at all of them. Causal attention, for which
        transformers would make the mask of a window, has none; packed rows are within it."""
        if isinstance(self.mask, Mapping):
            return self.mask["full_attention" if window is None else "sliding_attention"]
        if self.mask is not None or window is None or window >= self.width:
            return self.mask
        ones_TT = torch.ones(self.width, self.width, dtype=torch.bool, device=device)
        return ones_TT.tril_().triu_(1 - window)[None, None]

    def cut(self, part_NT: torch.Tensor, filling: int = 0) -> torch.Tensor:
        """Return this rank's [N, t] or [N, t, ...] of whole rows. filling: of what fills the last slice."""
        missing = self.length * self.group.size - part_NT.shape[1]
        widths = (0, 0) * (part_NT.dim() - 2) + (0, missing)
        filled = functional.pad(part_NT, widths, value=filling) if missing else part_NT
        return filled.narrow(1, self.group.place * self.length, self.length)

    def cut_slots(self, slots_L: torch.Tensor, filling: int = 0) -> torch.Tensor:
        """Return this rank's [N * t] or [N * t, ...] of the slots of all rows, [N * T] or fewer in a last block."""
        count = -(-len(slots_L) // self.width)
        return self.cut(slots_L.unflatten(0, (count, -1)), filling).flatten(0, 1)

    def whole_slots(self, slots_l: torch.Tensor) -> torch.Tensor:
        """Return whole numbers [N * T] or [N * T, ...] of the slots of all rows, the same on every rank of the group,
        of this rank's [N * t]; without gradients. A collective."""
        own_Nt = slots_l.detach().unflatten(0, (-1, self.length))
        all_NT = own_Nt.new_zeros(len(own_Nt), self.group.size * self.length, *own_Nt.shape[2:], dtype=torch.int64)
        all_NT.narrow(1, self.group.place * self.length, self.length).copy_(own_Nt)
        return summed_over_group(all_NT, self.group)[:, : self.width].flatten(0, 1).to(slots_l.dtype)

    def moved(self, states_lH: torch.Tensor, from_L: torch.Tensor) -> torch.Tensor:
        """Return [N * t, H], for each of this rank's slots the states of the slot that `from_L`, int64 [N * T], names
        for it, which another rank may hold. A collective, in the backward too, and a wait for the device.

        Slices of three tokens, from_L [0 0 1 2 3 4]: slot 3, of rank 1, takes the state of slot 2, of rank 0. Only
        that one is exchanged.
        """
        rank_L = torch.arange(len(from_L), device=from_L.device) % self.width // self.length
        crosses_L = from_L % self.width // self.length != rank_L
        sources_S, source_X = from_L[crosses_L].unique(return_inverse=True)
        own = self.owned(sources_S)
        dtype = torch.promote_types(states_lH.dtype, torch.float32)  # a state's gradients are added in it
        nothing_SH = states_lH.new_zeros(own.count, states_lH.shape[1], dtype=dtype)
        sent_SH = nothing_SH.index_copy(0, own.which_m, states_lH[own.local_m].to(dtype))
        brought_SH = brought_to_group(sent_SH, self.group).to(states_lH.dtype)
        index_L = from_L // self.width * self.length + from_L % self.width % self.length
        index_L[crosses_L] = len(states_lH) + source_X
        return torch.cat([states_lH, brought_SH]).index_select(0, self.cut_slots(index_L))

    def owned(self, positions_M: torch.Tensor) -> OwnedPositions:
        """Return which of some flat positions n*T+i of whole rows are in this rank's slices. A wait for the device."""
        row_M, place_M = positions_M // self.width, positions_M % self.width
        which_m = (place_M // self.length == self.group.place).nonzero().flatten()
        local_M = row_M * self.length + place_M - self.group.place * self.length
        return OwnedPositions(self.group, which_m, local_M[which_m], len(positions_M))


@dataclass(frozen=True)
class OwnedPositions(OwnPositions):
    """Positions in this rank's slices. which_m: int64, which of all `count` they are. local_m: int64, flat positions
    n*t+i in the slices."""

    group: SequenceGroup
    which_m: torch.Tensor
    local_m: torch.Tensor
    count: int

    def of(self, values_M: torch.Tensor) -> torch.Tensor:
        """See `OwnPositions.of`."""
        return values_M[self.which_m]

    def whole(self, values_m: torch.Tensor) -> torch.Tensor:
        """See `OwnPositions.whole`."""
        if values_m.dtype == torch.bool:
            return self.whole(values_m.float()) > 0
        nothing = values_m.new_zeros(self.count, *values_m.shape[1:])
        return summed_over_group(nothing.index_copy(0, self.which_m, values_m), self.group)


def sliced_inputs(inputs: Mapping[str, Any], group: SequenceGroup) -> tuple[dict[str, Any], RowSlice]:
    """Return the arguments of a transformers model's forward for this rank's slices of the rows that `inputs` holds
    whole, and the slices. Positions stay those in the row, and what attention takes stays whole."""
    names = [name for name in ("input_ids", "inputs_embeds", "position_ids") if name in inputs]
    count, width = inputs[names[0]].shape[:2]
    part = RowSlice(group, width, inputs["attention_mask"])
    cut = {name: part.cut(inputs[name]) for name in names}
    return {**inputs, **cut, "attention_mask": _unread(part, count, cut[names[0]].device), ROW_PART: part}, part


def _unread(part: RowSlice, count: int, device: torch.device) -> torch.Tensor:
    """A mask that transformers passes through, and nothing reads; of one byte."""
    return torch.zeros((), dtype=torch.bool, device=device).expand(count, 1, part.length, part.length)


def cut_by(language_model: torch.nn.Module) -> None:
    """Have the language model inside a model of media cut the rows that it is given, embeddings of texts and media:
    the model puts them together on whole rows."""
    if _CUTS not in language_model.__dict__:
        language_model.__dict__[_CUTS] = language_model.register_forward_pre_hook(_cut_rows, with_kwargs=True)


def _cut_rows(language_model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    part: RowSlice | None = kwargs.get(ROW_PART)
    if part is None or not part.at_language:
        return None
    embeddings_NTH, given = kwargs["inputs_embeds"], dict(kwargs)
    given["inputs_embeds"] = part.cut(embeddings_NTH)
    given["attention_mask"] = _unread(part, len(embeddings_NTH), embeddings_NTH.device)
    positions = kwargs["position_ids"]  # [N, T], or with an axis before them
    of_axes = part.cut(positions.reshape(-1, part.width))
    given["position_ids"] = of_axes.unflatten(0, positions.shape[:-1])
    is_medium_NT = kwargs.get("visual_pos_masks")
    if is_medium_NT is not None:  # states of the tower that are added to those of the first layers (Qwen3-VL)
        own = part.owned(is_medium_NT.flatten().nonzero().flatten())
        given["visual_pos_masks"] = part.cut(is_medium_NT)
        given["deepstack_visual_embeds"] = [each[own.which_m] for each in kwargs["deepstack_visual_embeds"]]
    others = {name for name, value in kwargs.items() if isinstance(value, torch.Tensor)} - {*_CUT_ARGUMENTS}
    if args or others:
        raise ThreestepError(
            f"--sequence_parallel_size {part.group.size}: {type(language_model).__name__} also receives "
            f"{', '.join(sorted(others)) or 'positional arguments'}, which cannot be split across ranks; drop "
            "--sequence_parallel_size"
        )
    return args, given
