"""Decode steps whose tensors stay where they are: on CUDA, a graph of their kernels.

A graph is started by one call of the host. Decoding needs that: a forward of one token is a thousand small kernels, and
the host takes longer to start them than the GPU to compute them.

Keys and values have their room from the start; a step writes the column of its token, and attention reads all the room
with a mask of what is filled. A layer with a window has as many columns as the window and writes them in turns: keys
carry their positions, so that their order does not matter. A capture is valid for one number of rows and one size of
the room; both change a few times in a rollout.

A rows, H heads, T tokens, L columns, D head size, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer

from training.utils.generation.decoding.cache import (
    Moves,
    additive,
    compacted,
    for_attention,
    roomier_tokens,
    window_of,
)

if TYPE_CHECKING:
    from transformers import Cache

# Of a mask: torch's memory-efficient kernel copies one of another width, in every layer (torch 2.13).
_ALIGNED_COLUMNS = 16


def aligned(columns: int) -> int:
    """Return that many columns, or a few more: CUDA's kernels read a mask of this width without a copy."""
    return -(-columns // _ALIGNED_COLUMNS) * _ALIGNED_COLUMNS


class CapturedStep:
    """Calls `function`, which reads and writes tensors in fixed places, and returns one.

    On CUDA its kernels are captured once, after one ordinary call, and replayed: so `function` must give the same when
    it is called twice, and must not depend on anything of the host that changes. What it returns is overwritten by the
    next call. On other devices each call is an ordinary one.
    """

    def __init__(
        self, function: Callable[[], torch.Tensor], device: torch.device, before: CapturedStep | None = None
    ) -> None:
        """before: a step that is no longer called; its memory is used again. RuntimeError if `function` makes the host
        wait for the device, which a graph cannot hold."""
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._graph, self._output = _graph_of(function, before._graph if before is not None else None)

    def __call__(self) -> torch.Tensor:
        if self._graph is None:
            return self._function()
        self._graph.replay()
        return self._output


def _graph_of(
    function: Callable[[], torch.Tensor], before: torch.cuda.CUDAGraph | None
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """Return a graph and the tensor that each replay fills."""
    current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(current)
    # Libraries take their workspaces at a first call. What waits is found here, since a capture that fails half-way
    # leaves torch's allocator in it.
    with torch.cuda.stream(aside), _waits_are_errors():
        function()
    current.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    pool = None if before is None else before.pool()
    # Another thread may copy the next batch to the device meanwhile.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        output = function()
    return graph, output


@contextlib.contextmanager
def _waits_are_errors() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


# (ids [A, 1], mask, positions [A, 1]) -> logits [A, V] of the next token.
Forward = Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]

# Rows that are over stay until no more than this share goes on.
_GOING_SHARE = 0.5


class _Columns:
    """The column that the next token takes and those that are filled, of all layers with one window.

    mask_A11L: 0 at tokens, -inf at padding and at columns that are not filled.
    """

    def __init__(self, seen_AT: torch.Tensor, window: int | None, extent: int, dtype: torch.dtype) -> None:
        rows, self.tokens = seen_AT.shape
        self.is_ring, self.count = window is not None, window or extent
        first = 0 if window is None else max(0, self.tokens - (window - 1))
        self.of_held = torch.arange(first, self.tokens, device=seen_AT.device) % self.count
        seen_AL = torch.zeros(rows, self.count, dtype=torch.bool, device=seen_AT.device)
        seen_AL[:, self.of_held] = seen_AT[:, first:]
        self.mask_A11L = additive(seen_AL, dtype)[:, None, None]
        self.place_1 = torch.zeros(1, dtype=torch.int64, device=seen_AT.device)

    def widen(self, extent: int) -> None:
        self.mask_A11L = torch.nn.functional.pad(self.mask_A11L, (0, extent - self.count), value=float("-inf"))
        self.count = extent

    def give_next(self, tokens: int) -> None:
        """Give the token after `tokens` others its column."""
        self.tokens = tokens
        self.place_1.fill_(tokens % self.count)
        self.mask_A11L.select(-1, tokens % self.count).fill_(0.0)


class FixedLayer(DynamicLayer):
    """Keys and values [A, H, L, D]; `columns` knows which are filled."""

    def __init__(self, held: Any, columns: _Columns) -> None:
        super().__init__()
        self.is_sliding, self.is_initialized = held.is_sliding, True
        self._columns = columns
        self.keys, self.values = (self._room(part) for part in (held.keys, held.values))

    def _room(self, held_AHTD: torch.Tensor) -> torch.Tensor:
        rows, heads, _, size = held_AHTD.shape
        # Zeros: what a mask hides is still multiplied by 0.
        room = held_AHTD.new_zeros(rows, heads, self._columns.count, size)
        room[:, :, self._columns.of_held] = held_AHTD
        return room

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new token's column; return all."""
        assert self.keys is not None and self.values is not None
        for room, states in ((self.keys, key_states), (self.values, value_states)):
            room.index_copy_(2, self._columns.place_1, states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Tokens before this step's, with their padding."""
        return self._columns.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._columns.count, 0

    def widen(self) -> None:
        """Take the room that the columns have now."""
        assert self.keys is not None and self.values is not None
        extra = (0, 0, 0, self._columns.count - self.keys.shape[2])
        self.keys, self.values = (torch.nn.functional.pad(part, extra) for part in (self.keys, self.values))

    def leave(self, moves: Moves) -> None:
        """Drop rows."""
        assert self.keys is not None and self.values is not None
        self.keys, self.values = compacted(self.keys, moves), compacted(self.values, moves)


class FixedSteps:
    """The rows of a decode loop from their first drawn token on."""

    def __init__(
        self,
        forward: Forward,
        cache: Cache,
        windows: Mapping[str, int | None],
        seen_AT: torch.Tensor,
        *,
        position_A1: torch.Tensor,
        limit_tokens: int,
    ) -> None:
        """cache: holds the prompts; its layers are replaced. windows: see `windows_of`. seen_AT: bool, False at
        padding. position_A1: of the last tokens."""
        layers: list[Any] = cache.layers
        self._forward, self._limit = forward, limit_tokens
        extent, dtype = self._extent(seen_AT.shape[1] + 1), layers[0].keys.dtype
        columns = {window: _Columns(seen_AT, window, extent, dtype) for window in {*windows.values()}}
        self._of_kind = {name: columns[window] for name, window in windows.items()}
        self._columns = list(columns.values())
        for place, layer in enumerate(layers):  # one at a time: two whole caches would be the height of a rollout
            layers[place] = FixedLayer(layer, columns[window_of(layer)])
        self._layers = layers
        self._position_A1, self._token_A1 = position_A1.clone(), torch.zeros_like(position_A1)
        self._step: CapturedStep | None = None
        self._is_captured = False

    @staticmethod
    def leave_now(over: Sequence[bool]) -> bool:
        """Return whether the rows that are over leave: each number of rows is a capture of its own, as long as some
        tokens."""
        return over.count(False) <= _GOING_SHARE * len(over)

    def step(self, token_A: torch.Tensor, tokens: int) -> torch.Tensor:
        """Append one token to each row, which has `tokens` already; return the logits [A, V] of the next. They are
        overwritten by the next call."""
        for columns in self._columns:
            if not columns.is_ring and tokens == columns.count:
                columns.widen(self._extent(tokens + 1))
                self._is_captured = False
            columns.give_next(tokens)
        self._token_A1.copy_(token_A.unsqueeze(1))
        self._position_A1.add_(1)
        if not self._is_captured:
            self.capture()
        assert self._step is not None
        return self._step()

    def capture(self) -> None:
        """Take the room that is there now, and record a step in it."""
        for layer in self._layers:
            layer.widen()
        self._step, self._is_captured = CapturedStep(self._called, self._token_A1.device, self._step), True

    def _extent(self, need_tokens: int) -> int:
        return aligned(roomier_tokens(need_tokens, self._limit))

    def _called(self) -> torch.Tensor:
        masks = {name: columns.mask_A11L for name, columns in self._of_kind.items()}
        return self._forward(self._token_A1, for_attention(masks), self._position_A1)

    def leave(self, moves: Moves) -> None:
        """Drop rows."""
        for layer in self._layers:
            layer.leave(moves)
        for columns in self._columns:
            columns.mask_A11L = compacted(columns.mask_A11L, moves)
        self._position_A1, self._token_A1 = (compacted(part, moves) for part in (self._position_A1, self._token_A1))
        self._is_captured = False
