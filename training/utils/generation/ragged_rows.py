"""Decoded rows of different lengths, which part and come together again: paths of a block, and the trunk behind them.

Each row writes its next token behind its own last one, and a mask tells what is filled. A row may be copied, leave, and
take tokens of other rows behind its own: keys carry their positions, so that the order of columns does not matter.

A rows, H heads, L columns, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from transformers.cache_utils import DynamicLayer

from training.utils.generation.cache import roomier_tokens
from training.utils.generation.decoding import Decoding
from training.utils.generation.step_masks import additive, for_attention, windows_of

_NO_LIMIT = 1 << 40
_Item = TypeVar("_Item")

# Of each layer the keys and the values of some tokens of a row, [H, tokens, D].
Held = list[tuple[torch.Tensor, torch.Tensor]]


class _RaggedLayer(DynamicLayer):
    """Keys and values [A, H, L, D] in a room of more rows and columns, of which the first are used."""

    def __init__(self, held: Any, rows: RaggedRows) -> None:
        super().__init__()
        self.is_initialized = True
        self._rows = rows
        self.rooms: list[torch.Tensor] = [held.keys, held.values]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write each row's new token; return all."""
        rows, heads = key_states.shape[:2]
        index_AH = self._rows.flat_places(heads)
        for room, states in zip(self.rooms, (key_states, value_states), strict=True):
            room.view(-1, room.shape[-1]).index_copy_(0, index_AH, states.flatten(0, 2))
        extent = self._rows.extent
        keys, values = (room[:rows, :, :extent] for room in self.rooms)
        return keys, values

    def get_seq_length(self) -> int:
        """Columns before this step's."""
        return self._rows.extent - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._rows.extent, 0


class RaggedRows:
    """The rows of a `Decoding` from its prompts on. filled: the columns of each row that hold tokens, or padding before
    them. extent: the columns that the present step reads."""

    def __init__(self, decoding: Decoding) -> None:
        """decoding: after `prefill`; its cache is replaced. ValueError if a layer sees but the last tokens, or holds
        something else than keys and values."""
        windows = windows_of(decoding.model.config, decoding.cache)
        if any(window is not None for window in windows.values()):
            raise ValueError("its layers see the last tokens alone, by the order in which they were drawn")
        self._decoding, self._kinds = decoding, list(windows)
        seen_AL = decoding.mask[:, : decoding.length].bool()
        self.filled = [decoding.length] * len(seen_AL)
        layers: list[Any] = decoding.cache.layers
        self._mask_AL = additive(seen_AL, layers[0].keys.dtype)
        self.extent = decoding.length
        self._places = (torch.arange(0), torch.arange(0))  # of the present step: the rows, and the columns they write
        self._flat_places: dict[int, torch.Tensor] = {}
        decoding.cache.layers = [_RaggedLayer(layer, self) for layer in layers]
        self._layers: list[_RaggedLayer] = decoding.cache.layers

    def step(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Append a token at its position to each row; return the logits [A, V] of the next."""
        device = self._mask_AL.device
        extent = max(self.filled) + 1
        self._make_room(len(tokens), extent)
        rows_A = torch.arange(len(tokens), device=device)
        columns_A = torch.tensor(self.filled, device=device)
        self.extent, self._places, self._flat_places = extent, (rows_A, columns_A), {}
        self._mask_AL[rows_A, columns_A] = 0.0
        mask_A11L = self._mask_AL[: len(tokens), None, None, :extent]
        given_A = torch.tensor([list(tokens), list(positions)], device=device)
        masks = for_attention(dict.fromkeys(self._kinds, mask_A11L))
        logits_AV = self._decoding.forward(given_A[0, :, None], masks, given_A[1, :, None])
        self.filled = [count + 1 for count in self.filled]
        return logits_AV

    def flat_places(self, heads: int) -> torch.Tensor:
        """Return int64 [A * heads], where the present step writes in a room whose rows, heads and columns are one
        dimension: a copy by one index costs half of one by two, and layers share it."""
        if heads not in self._flat_places:
            rows_A, columns_A = self._places
            heads_H = torch.arange(heads, device=rows_A.device)
            lines_AH = rows_A[:, None] * heads + heads_H
            self._flat_places[heads] = (lines_AH * self._mask_AL.shape[1] + columns_A[:, None]).flatten()
        return self._flat_places[heads]

    def held(self, row: int, start: int) -> Held:
        """Return a copy of what a row holds from column `start` on."""
        columns = slice(start, self.filled[row])
        return [
            (layer.rooms[0][row, :, columns].clone(), layer.rooms[1][row, :, columns].clone()) for layer in self._layers
        ]

    def take(self, row: int, parts: Sequence[Held]) -> None:
        """Append to a row what others held."""
        for part in parts:
            start = self.filled[row]
            end = start + part[0][0].shape[1]
            self._make_room(len(self.filled), end)
            for layer, held in zip(self._layers, part, strict=True):
                for room, states in zip(layer.rooms, held, strict=True):
                    room[row, :, start:end] = states
            self._mask_AL[row, start:end] = 0.0
            self.filled[row] = end

    def reorder(self, order: Sequence[int]) -> None:
        """Let row `order[i]` be row i; rows may be there several times, or not at all. Only rows that are at another
        place than before are copied (see `arranged`)."""
        self._make_room(len(order), max(self.filled) + 1)  # for the step that follows
        moved = [(row, old) for row, old in enumerate(order) if row != old]
        self.filled = [self.filled[old] for old in order]
        if moved:
            to, old = torch.tensor(moved, device=self._mask_AL.device).unbind(1)
            extent = max(self.filled)
            for layer in self._layers:
                for room in layer.rooms:
                    room[to, :, :extent] = room[old, :, :extent]
            self._mask_AL[to] = self._mask_AL[old]

    def _make_room(self, rows: int, columns: int) -> None:
        """Have room for so many, and for some to come."""
        had_rows, had_columns = self._mask_AL.shape
        if rows <= had_rows and columns <= had_columns:
            return
        more_rows = max(rows - had_rows, had_rows // 4) if rows > had_rows else 0
        wanted = roomier_tokens(columns, _NO_LIMIT) if columns > had_columns else had_columns
        # Zeros: what a mask hides is still multiplied by 0.
        extra = (0, wanted - had_columns, 0, more_rows)
        self._mask_AL = torch.nn.functional.pad(self._mask_AL, extra, value=float("-inf"))
        for layer in self._layers:
            layer.rooms = [
                torch.nn.functional.pad(room, (0, 0, 0, extra[1], 0, 0, 0, extra[3])) for room in layer.rooms
            ]


def arranged(rows: Sequence[tuple[int, _Item]]) -> list[tuple[int, _Item]]:
    """Return (old row, what it is) of rows that go on, so that as many as can keep their place: the others, and further
    copies of a row, take the places that are left."""
    found: list[tuple[int, _Item] | None] = [None] * len(rows)
    others = []
    for entry in rows:
        if entry[0] < len(rows) and found[entry[0]] is None:
            found[entry[0]] = entry
        else:
            others.append(entry)
    left = iter(others)
    return [next(left) if entry is None else entry for entry in found]
