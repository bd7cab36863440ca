"""The images of a row as numbers, as they are stored and sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from training.utils.images.spans import ImageSpan

SPAN_NUMBERS, KEY_AT = 6, 4  # begin, tokens, height and width (0: none), key, sees_itself
_NONE = np.zeros(0, np.int32)


def span_numbers(spans: Sequence[ImageSpan]) -> np.ndarray:
    """The images of a row as int32 [images * SPAN_NUMBERS]."""
    if not spans:
        return _NONE
    numbers = [(one.begin, one.tokens, *(one.sides or (0, 0)), one.key, one.sees_itself) for one in spans]
    return np.array(numbers, np.int32).reshape(-1)


def spans_of(numbers: np.ndarray) -> tuple[ImageSpan, ...]:
    """The images that `span_numbers` stored."""
    if len(numbers) == 0:
        return ()
    from training.utils.images.spans import ImageSpan  # torch, which rows of text do without

    return tuple(
        ImageSpan(begin, tokens, (height, width) if height else None, key, bool(sees_itself))
        for begin, tokens, height, width, key, sees_itself in numbers.reshape(-1, SPAN_NUMBERS).tolist()
    )
