"""The media of a row as numbers, as they are stored and sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from training.utils.contracts.media_spans import MediaSpan

SPAN_NUMBERS, KEY_AT = 6, 4  # begin, tokens, height and width (0: none), key, sees_itself
_NONE = np.zeros(0, np.int32)


def span_numbers(spans: Sequence[MediaSpan]) -> np.ndarray:
    """Return the media of a row as int32 [media * SPAN_NUMBERS]."""
    if not spans:
        return _NONE
    numbers = [(one.begin, one.tokens, *(one.sides or (0, 0)), one.key, one.sees_itself) for one in spans]
    return np.array(numbers, np.int32).reshape(-1)


def spans_of(numbers: np.ndarray) -> tuple[MediaSpan, ...]:
    """Return the media that `span_numbers` stored."""
    if len(numbers) == 0:
        return ()
    from training.utils.contracts.media_spans import MediaSpan  # torch, which rows of text do without

    return tuple(
        MediaSpan(begin, tokens, (height, width) if height else None, key, bool(sees_itself))
        for begin, tokens, height, width, key, sees_itself in numbers.reshape(-1, SPAN_NUMBERS).tolist()
    )
