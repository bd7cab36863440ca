"""Media in rows of tokens: where their tokens stand, and which positions they have.

Knows no model: which families count positions along the sides of a medium is decided by what makes the spans.

T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class MediaSpan:
    """The tokens of one medium in a sequence.

    begin, tokens: where they stand.
    sides: height and width of the grid that the tokens are, row by row, where the model's positions count along both
        (M-RoPE, Qwen2-VL and later: Wang et al. 2024, "Qwen2-VL", section 2.1); None where they count on as in a text.
    key: names the medium for what reads it.
    sees_itself: each of its tokens sees all others, later ones too (Gemma 3).
    """

    begin: int
    tokens: int
    sides: tuple[int, int] | None = None
    key: int = 0
    sees_itself: bool = False

    def __post_init__(self) -> None:
        if self.sides is not None and self.sides[0] * self.sides[1] != self.tokens:
            raise AssertionError(f"a medium of {self.tokens} tokens cannot be a grid of {self.sides}")

    @property
    def end(self) -> int:
        return self.begin + self.tokens

    @property
    def positions(self) -> int:
        """The distance from the medium's first token to the next token after it, in positions."""
        return self.tokens if self.sides is None else max(self.sides)


def positions_taken(length: int, media: Sequence[MediaSpan]) -> int:
    """Return the position of the token after a sequence of `length` tokens whose first is at 0."""
    return length - sum(medium.tokens - medium.positions for medium in media)


def position_axes(length: int, media: Sequence[MediaSpan]) -> torch.Tensor:
    """Return int64 [3, T]: the positions of a sequence of `length` tokens along time, height and width, from 0.

    Worked example: two tokens of text, a medium of 2 x 3 tokens, two tokens of text:
        time    0 1  2 2 2 2 2 2  5 6
        height  0 1  2 2 2 3 3 3  5 6
        width   0 1  2 3 4 2 3 4  5 6
    A text is alike on all axes. A medium has one time, and the text goes on after its longer side.
    """
    axes_3T = torch.arange(length).repeat(3, 1)
    for medium in media:
        if medium.sides is None:
            continue
        height, width = medium.sides
        first = int(axes_3T[0, medium.begin])
        axes_3T[:, medium.end :] -= medium.tokens - medium.positions
        axes_3T[0, medium.begin : medium.end] = first
        axes_3T[1, medium.begin : medium.end] = first + torch.arange(height).repeat_interleave(width)
        axes_3T[2, medium.begin : medium.end] = first + torch.arange(width).repeat(height)
    return axes_3T


def media_between(media: Sequence[MediaSpan], begin: int, end: int) -> tuple[MediaSpan, ...]:
    """Return the media of the tokens [begin, end) of a sequence, counted from `begin`; AssertionError if that cuts
    one."""
    inside = [medium for medium in media if medium.begin < end and medium.end > begin]
    if any(medium.begin < begin or medium.end > end for medium in inside):
        raise AssertionError(f"the tokens {begin} to {end} cut a medium")
    return tuple(replace(medium, begin=medium.begin - begin) for medium in inside)
