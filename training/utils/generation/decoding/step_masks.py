"""The mask that attention reads for one more token of each row, made once for a whole rollout.

A family makes it anew in each forward from which tokens are padding (a dozen operators), and asks the device whether
any is: a wait for every token. A row's response is never padding, so that all that changes from token to token is how
much of the mask is read.

A rows, T tokens, L columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from training.utils.generation.decoding.cache import Moves, RoomyLayer, compacted

if TYPE_CHECKING:
    from transformers import Cache

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
        raise ValueError("layers of one kind have different windows")
    return found


def window_of(layer: Any) -> int | None:
    """Return how many of the last tokens a layer sees; None if all. ValueError: see `windows_of`."""
    if type(layer) in (RoomyLayer, DynamicLayer):
        return None
    if type(layer) is DynamicSlidingWindowLayer:
        return layer.sliding_window
    raise ValueError(f"its cache has a layer of its own kind ({type(layer).__name__})")


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
