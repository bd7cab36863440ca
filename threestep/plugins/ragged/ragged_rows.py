"""Decoded rows of different lengths: parts of a response beside each other, and turns of conversations,
which join the batch and leave it.

Each row writes its next tokens behind its own last one, and a mask tells what is filled. A row may be copied, leave, be
given several tokens at once, and take tokens of other rows behind its own: keys carry their positions, so that the
order of columns does not matter.

A rows, J of them that follow one another, Q tokens given at once, H heads, L columns, D head size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers.cache_utils import DynamicLayer

from training.utils.generation.decoding.cache import additive, for_attention, roomier_tokens, roomy_cache, windows_of
from training.utils.plugins.registry import plugin_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NO_LIMIT = 1 << 40
# Of the mask of rows that are given several tokens at once: 128 MiB of float32.
_MASK_NUMBERS = 1 << 25
_Item = TypeVar("_Item")

# Of each layer the keys and the values of some tokens of a row, [H, tokens, D].
Held = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class _Forward:
    """One forward: its rows are those from `first` on, column_JQ where they write, `extent` the columns that they
    read. lines: by the number of heads, see `written`."""

    first: int
    column_JQ: torch.Tensor
    extent: int
    lines: dict[int, torch.Tensor] = field(default_factory=dict)

    def written(self, heads: int, columns: int) -> torch.Tensor:
        """Return int64 [J * heads * Q], where the forward writes in a room whose rows, heads and `columns` are one
        dimension: a copy by one index costs half of one by two, and layers share it."""
        if heads not in self.lines:
            count, device = len(self.column_JQ), self.column_JQ.device
            rows_J, heads_H = torch.arange(count, device=device) + self.first, torch.arange(heads, device=device)
            lines_JH1 = (rows_J[:, None] * heads + heads_H).unsqueeze(2)
            self.lines[heads] = (lines_JH1 * columns + self.column_JQ.unsqueeze(1)).flatten()
        return self.lines[heads]


class _RaggedLayer(DynamicLayer):
    """Keys and values [A, H, L, D] in a room of more rows and columns, of which the first are used."""

    def __init__(self, rows: RaggedRows) -> None:
        super().__init__()
        self.is_initialized = True
        self._rows = rows
        self.rooms: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows' new tokens; return all that they read."""
        (rows, heads), now = key_states.shape[:2], self._rows.forward
        if not self.rooms:
            # Zeros: what a mask hides is still multiplied by 0.
            room = self._rows.room
            self.rooms = [
                part.new_zeros(room[0], heads, room[1], part.shape[-1]) for part in (key_states, value_states)
            ]
        index = now.written(heads, self.rooms[0].shape[2])
        for room_AHLD, states in zip(self.rooms, (key_states, value_states), strict=True):
            room_AHLD.view(-1, room_AHLD.shape[-1]).index_copy_(0, index, states.flatten(0, 2))
        keys, values = (part[now.first : now.first + rows, :, : now.extent] for part in self.rooms)
        return keys, values

    def get_seq_length(self) -> int:
        """Columns before this forward's."""
        return self._rows.forward.extent - self._rows.forward.column_JQ.shape[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._rows.forward.extent, 0


class RaggedRows:
    """Rows of a model's cache, none at first. filled: the columns of each that hold tokens. shifts: from a row's next
    column to the position of its token, 0 but behind media that count otherwise. room: how many rows and columns there
    is memory for. forward: the present one."""

    def __init__(self, model: PreTrainedModel, fixed: bool = False) -> None:
        """fixed: steps are captured, by the plugin `captured`: they read all columns that there is room for.
        ValueError if a layer sees but the last tokens, or holds something else than keys and values."""
        self._cache: Any = roomy_cache(model, 0)
        windows = windows_of(model.config, self._cache)
        if any(window is not None for window in windows.values()):
            raise ValueError("its layers see only the most recent tokens, in the order in which they were generated")
        self._model, self._kinds = model, list(windows)
        self._graphs: Any = plugin_module("captured", "steps") if fixed else None
        self._layers = [_RaggedLayer(self) for _ in self._cache.layers]
        self._cache.layers = self._layers
        self.filled: list[int] = []
        self.shifts: list[int] = []
        self.room = (0, 0)
        self.forward: _Forward
        self._given: tuple[torch.Tensor, ...] = ()  # of a captured step: tokens, columns and positions
        self._step: Any = None

    def add(self, count: int) -> None:
        """Add rows that hold nothing."""
        self.filled += [0] * count
        self.shifts += [0] * count

    @property
    def positions(self) -> list[int]:
        """The position of each row's next token."""
        return [filled + shift for filled, shift in zip(self.filled, self.shifts, strict=True)]

    def begin(self, first: int, prompts: Sequence[Sequence[int]], media: Sequence[Any]) -> torch.Tensor:
        """Give the rows from `first` on, which hold nothing, their prompts; return the logits [J, V] behind each.

        media: of each prompt; None of a text. Texts that follow one another are computed together, and a prompt with
        media by itself.
        """
        parts, row = list[torch.Tensor](), first
        for is_text, group in groupby(zip(prompts, media, strict=True), key=lambda pair: pair[1] is None):
            pairs = list(group)
            if is_text:
                parts.append(self.give(row, [prompt for prompt, _ in pairs]))
            else:
                parts += [self._begun_with(row + place, *pair) for place, pair in enumerate(pairs)]
            row += len(pairs)
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _begun_with(self, row: int, tokens: Sequence[int], media: Any) -> torch.Tensor:
        """Give a row a prompt with media; return the logits [1, V] behind it."""
        device, length = self._model.device, len(tokens)
        self.make_room(length)
        ids_1Q, columns_1Q = torch.tensor([tokens], device=device), torch.arange(length, device=device).unsqueeze(0)
        taken_11, by_sides = media.positions(torch.ones_like(ids_1Q, dtype=torch.bool))
        positions = columns_1Q if by_sides is None else by_sides
        accepted = inspect.signature(self._model.forward).parameters
        logits_1V = torch.empty(0)
        for begin, end, own in media.in_parts(length, max(1, _MASK_NUMBERS // length)):
            of_media = {}
            if any(own.spans):
                is_token_1Q = torch.ones(1, end - begin, dtype=torch.bool, device=device)
                of_media = own.forward_kwargs(self._model, is_token_1Q, accepted)
            forward = _Forward(row, columns_1Q[:, begin:end], end)
            logits_1V = self._called(ids_1Q[:, begin:end], positions[..., begin:end], forward, of_media)
        self.filled[row], self.shifts[row] = length, int(taken_11) - length
        return logits_1V

    def give(self, first: int, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Append tokens to the rows from `first` on, one or more to each, at the positions of their columns; return
        the logits [J, V] behind the last of each. A row whose mask would be too large is given its tokens in parts."""
        width = max(map(len, tokens))
        extent = max(self.filled[first : first + len(tokens)]) + width
        self.make_room(extent)
        most_tokens = max(1, _MASK_NUMBERS // extent)
        if width > most_tokens:
            tokens = [self._begun(row, own, most_tokens) for row, own in enumerate(tokens, first)]
            width = max(map(len, tokens))
        most, parts = max(1, _MASK_NUMBERS // (width * extent)), list[torch.Tensor]()
        for start in range(0, len(tokens), most):
            parts.append(self._given_together(first + start, tokens[start : start + most]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _begun(self, row: int, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Give a row its tokens but for the last, `most` at a time; return the last, `most` or fewer."""
        while len(tokens) > most:
            self._given_together(row, [tokens[:most]])
            tokens = tokens[most:]
        return tokens

    def _given_together(self, first: int, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """The tokens of a row stand at the right of the batch, where logits are read. The padding before them is
        written behind them, where the row's next tokens will be."""
        device, width = self._model.device, max(map(len, tokens))
        end = first + len(tokens)
        ids_JQ = torch.tensor([[0] * (width - len(own)) + list(own) for own in tokens], device=device)
        filled_J1, shift_J1 = torch.tensor([self.filled[first:end], self.shifts[first:end]], device=device).unsqueeze(2)
        padding_J1 = torch.tensor([width - len(own) for own in tokens], device=device).unsqueeze(1)
        place_JQ = torch.arange(width, device=device) - padding_J1
        column_JQ = filled_J1 + place_JQ % width
        # A family may have no positions for the padding.
        position_JQ = (column_JQ + shift_J1).masked_fill(place_JQ < 0, 0)
        extent = max(self.filled[first:end]) + width
        logits_JV = self._called(ids_JQ, position_JQ, _Forward(first, column_JQ, extent))
        for row, own in enumerate(tokens, first):
            self.filled[row] += len(own)
        return logits_JV

    def step(
        self, token_A: torch.Tensor, column_A: torch.Tensor, position_A: torch.Tensor, extent: int
    ) -> torch.Tensor:
        """Write a token of each of the first A rows in its column; return the logits [A, V] of the next, which may be
        overwritten by the next call. extent: more than any column; there is room. `filled` stays as it is."""
        given = (token_A, column_A, position_A)
        if self._graphs is None:
            return self._stepped(given, extent)
        if not self._given or len(self._given[0]) != len(token_A):
            self._given = tuple(part.clone() for part in given)
            self._step = self._graphs.CapturedStep(self._captured, token_A.device, self._step)
        for place, part in zip(self._given, given, strict=True):
            place.copy_(part)
        return self._step()

    def _captured(self) -> torch.Tensor:
        return self._stepped(self._given, self.room[1])

    def _stepped(self, given: Sequence[torch.Tensor], extent: int) -> torch.Tensor:
        token_A1, column_A1, position_A1 = (part.unsqueeze(1) for part in given)
        return self._called(token_A1, position_A1, _Forward(0, column_A1, extent))

    def _called(
        self,
        ids_JQ: torch.Tensor,
        position_JQ: torch.Tensor,
        forward: _Forward,
        of_media: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        """of_media: further arguments of the model's forward."""
        self.forward = forward
        columns_L = torch.arange(forward.extent, device=ids_JQ.device)
        mask_J1QL = additive(columns_L <= forward.column_JQ.unsqueeze(2), self._model.dtype).unsqueeze(1)
        output = self._model(
            input_ids=ids_JQ,
            attention_mask=for_attention(dict.fromkeys(self._kinds, mask_J1QL)),
            position_ids=position_JQ,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
            **(of_media or {}),
        )
        return output.logits[:, -1].float()

    def append(self, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Append a token at its position to each row; return the logits [A, V] of the next."""
        extent = max(self.filled) + 1
        self.make_room(extent)
        given_3A = torch.tensor([list(tokens), self.filled, list(positions)], device=self._model.device)
        self.filled = [count + 1 for count in self.filled]
        return self.step(given_3A[0], given_3A[1], given_3A[2], extent)

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
            self.make_room(end)
            for layer, held in zip(self._layers, part, strict=True):
                for room, states in zip(layer.rooms, held, strict=True):
                    room[row, :, start:end] = states
            self.filled[row] = end

    def reorder(self, order: Sequence[int]) -> None:
        """Let row `order[i]` be row i; rows may be there several times, or not at all. Only rows that are at another
        place than before are copied (see `arranged`)."""
        moved = [(row, old) for row, old in enumerate(order) if row != old]
        self.filled, self.shifts = ([of[old] for old in order] for of in (self.filled, self.shifts))
        self.make_room(max(self.filled) + 1)  # for the step that follows
        extent = max((self.filled[row] for row, _ in moved), default=0)
        if extent:
            to, old = torch.tensor(moved, device=self._model.device).unbind(1)
            for layer in self._layers:
                for room in layer.rooms:
                    room[to, :, :extent] = room[old, :, :extent]

    def make_room(self, columns: int) -> None:
        """Have room for all rows and so many columns, and for some to come."""
        rows, (had_rows, had_columns) = len(self.filled), self.room
        if rows <= had_rows and columns <= had_columns:
            return
        wanted_rows, wanted = rows, had_columns
        if columns > had_columns:
            wanted = roomier_tokens(columns, _NO_LIMIT)
            wanted = wanted if self._graphs is None else self._graphs.aligned(wanted)
        elif had_rows:  # those of parts beside each other come a few at a time
            wanted_rows += had_rows // 4
        self.room, self._given = (wanted_rows, wanted), ()
        # What rows that have left held is cropped.
        extra = (0, 0, 0, wanted - had_columns, 0, 0, 0, wanted_rows - had_rows)
        for layer in self._layers:
            layer.rooms = [torch.nn.functional.pad(room, extra) for room in layer.rooms]


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
