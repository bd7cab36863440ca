"""The key-value cache of a decode loop, and the masks of its tokens: with room made in advance, and rows that can be
dropped.

transformers' cache concatenates the new token's keys with all earlier ones at each step, which copies the whole cache
for every token. Here a step writes one column. Layers that store something else (a sliding window, a state-space
model's state) remain transformers' own.

A family makes a mask anew in each forward (a dozen operators), from which tokens are padding, and asks the device
whether any is: a wait for every token. A response has no padding, so that from token to token only the width changes
that is read of one mask.

A rows, H heads, T tokens, L columns, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

# A full layer grows by this many tokens, or by this share of its length if that is more. Each token is copied only a
# few times in all, whatever the response's length, and at most a fifth of a long cache is unused.
_ROOM_TOKENS, _ROOM_SHARE = 128, 0.25


@dataclass(frozen=True)
class Moves:
    """Moves the `count` rows that stay together when others leave: the last rows fill the holes, and no other row is
    touched.

    holes, movers: int64, of equal length.
    """

    count: int
    holes: torch.Tensor
    movers: torch.Tensor

    @property
    def order(self) -> torch.Tensor:
        """int64 [count], the old index of each row that stays."""
        order = torch.arange(self.count, device=self.holes.device)
        order[self.holes] = self.movers
        return order


def moves_when_leaving(leaves: Sequence[bool], device: torch.device) -> Moves:
    """leaves[row]: True if the row leaves."""
    count = len(leaves) - sum(leaves)
    holes = [row for row in range(count) if leaves[row]]
    movers = [row for row in range(count, len(leaves)) if not leaves[row]]
    return Moves(count, torch.tensor(holes, device=device).long(), torch.tensor(movers, device=device).long())


def compacted(tensor: torch.Tensor, moves: Moves) -> torch.Tensor:
    """Return the rows that stay, in the memory of `tensor`, which is overwritten."""
    if len(moves.holes):
        tensor[moves.holes] = tensor[moves.movers]
    return tensor[: moves.count]


class RoomyLayer(DynamicLayer):
    """A layer's keys and values [A, H, T, D], stored at the front of tensors longer than T."""

    def __init__(self, limit_tokens: int) -> None:
        super().__init__()
        self._limit_tokens = limit_tokens
        self._rooms: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new tokens and return views of all."""
        if not self.is_initialized:  # the prompts; later tokens may have more rows
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states, value_states
            return self.keys, self.values
        assert self.keys is not None and self.values is not None
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if self._rooms is None or end > self._rooms[0].shape[-2]:
            self._rooms = (self._roomier(self.keys, end), self._roomier(self.values, end))
        rooms = self._rooms
        for room, states in zip(rooms, (key_states, value_states), strict=True):
            room[:, :, start:end] = states
        self.keys, self.values = (room[:, :, :end] for room in rooms)
        return self.keys, self.values

    def _roomier(self, held: torch.Tensor, need_tokens: int) -> torch.Tensor:
        rows, heads, length, size = held.shape
        room = held.new_empty(rows, heads, roomier_tokens(need_tokens, self._limit_tokens), size)
        room[:, :, :length] = held
        return room

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder or repeat rows: a copy without room."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]  # accepts any int64 tensor
        self._rooms = None

    def leave(self, moves: Moves) -> None:
        """Drop rows: at most as many rows are copied as leave."""
        if self._rooms is None:
            self.reorder_cache(moves.order)
            return
        length = self.get_seq_length()
        for room in self._rooms:
            compacted(room[:, :, :length], moves)
        self._rooms = (self._rooms[0][: moves.count], self._rooms[1][: moves.count])
        self.keys, self.values = (room[:, :, :length] for room in self._rooms)


def roomier_tokens(need_tokens: int, limit_tokens: int) -> int:
    """Return the size of a room for `need_tokens` and some to come, `limit_tokens` at most."""
    wanted = need_tokens + max(_ROOM_TOKENS, int(_ROOM_SHARE * need_tokens))
    return max(min(wanted, limit_tokens), need_tokens)


def roomy_cache(model: PreTrainedModel, limit_tokens: int) -> DynamicCache:
    """Return an empty cache of the kind that `model` needs, for sequences of at most `limit_tokens`."""
    cache = DynamicCache(config=model.config)
    cache.layers = [RoomyLayer(limit_tokens) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def holds_keys_alone(cache: Any) -> bool:
    """Return whether every layer of a `roomy_cache` takes the tokens of several forwards one behind the other: keys and
    values of all tokens or of the last."""
    return all(type(layer) in (RoomyLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


def reorder(cache: Cache, order: torch.Tensor) -> None:
    """Select rows by `order` (int64, repeats allowed); copies the cache."""
    if type(cache).batch_select_indices is not Cache.batch_select_indices:  # it holds more than its layers do
        cache.batch_select_indices(order)
        return
    layers: list[Any] = cache.layers
    for layer in layers:  # transformers' other methods skip state-space layers
        layer.reorder_cache(order)


def cut(cache: Cache, tokens: int) -> None:
    """Keep the first `tokens` columns of layers that hold all tokens."""
    layers: list[Any] = cache.layers
    for layer in layers:
        layer.keys, layer.values = layer.keys[:, :, :tokens], layer.values[:, :, :tokens]


def leave(cache: Cache, moves: Moves) -> None:
    """Drop rows. Layers other than RoomyLayer are copied, as they are at each step anyway."""
    layers: list[Any] = cache.layers
    if not any(isinstance(layer, RoomyLayer) for layer in layers):
        reorder(cache, moves.order)
        return
    for layer in layers:
        if isinstance(layer, RoomyLayer):
            layer.leave(moves)
        else:
            layer.reorder_cache(moves.order)


# The name of the only kind of layer, where a family has one.
_ALL = ""


def windows_of(config: Any, cache: Cache) -> dict[str, int | None]:
    """Return how many of the last tokens each kind of layer sees (None: all), by its name in `config.layer_types`.

    ValueError if a layer holds something else than keys and values of the last tokens, or if a kind has two windows.
    """
    windows = [window_of(layer) for layer in cache.layers]
    names = getattr(config.get_text_config(decoder=True), "layer_types", None) or [_ALL] * len(windows)
    found = dict(zip(names, windows, strict=True))
    if any(found[name] != window for name, window in zip(names, windows, strict=True)):
        raise ValueError("layers of the same type have different windows")
    return found


def window_of(layer: Any) -> int | None:
    """Return how many of the last tokens a layer sees; None if all. ValueError: see `windows_of`."""
    if type(layer) in (RoomyLayer, DynamicLayer):
        return None
    if type(layer) is DynamicSlidingWindowLayer:
        return layer.sliding_window
    raise ValueError(f"its cache has a custom layer type ({type(layer).__name__})")


def for_attention(masks: Mapping[str, torch.Tensor]) -> Any:
    """Return masks by kind of layer as a forward takes them: one mask, or a dict where kinds differ."""
    return dict(masks) if len(masks) > 1 else next(iter(masks.values()))


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where `seen`, else -inf: added to the scores, which spares attention the conversion in every layer."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


class StepMasks:
    """Masks for a cache that grows: the part of one mask that a layer's keys are."""

    def __init__(self, windows: Mapping[str, int | None], seen_AL: torch.Tensor, dtype: torch.dtype) -> None:
        """seen_AL: bool, False at padding; of all tokens to come."""
        self._windows = windows
        self._mask_A11L = additive(seen_AL, dtype)[:, None, None]

    def leave(self, moves: Moves) -> None:
        """Drop rows."""
        self._mask_A11L = compacted(self._mask_A11L, moves)

    def at(self, tokens: int) -> Any:
        """Return what attention reads for each row's token number `tokens`, padding counted."""
        starts = {name: 0 if window is None else max(0, tokens - window) for name, window in self._windows.items()}
        return for_attention({name: self._mask_A11L[..., start:tokens] for name, start in starts.items()})
