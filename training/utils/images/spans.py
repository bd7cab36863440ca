"""Images in rows of tokens: where their tokens stand, which positions they have, and what a vision tower takes.

Knows no model: which families count positions along the sides of an image is decided by what makes the spans.

I images of a micro-batch, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from training.utils.images.kept_features import KnownPictures


@dataclass(frozen=True)
class ImageSpan:
    """The tokens of one image in a sequence.

    begin, tokens: where they stand.
    sides: height and width of the grid that the tokens are, row by row, where the model's positions count along both
        (M-RoPE, Qwen2-VL and later: Wang et al. 2024, "Qwen2-VL", section 2.1); None where they count on as in a text.
    key: names the image for what makes its pixels.
    sees_itself: each of its tokens sees all others, later ones too (Gemma 3).
    """

    begin: int
    tokens: int
    sides: tuple[int, int] | None = None
    key: int = 0
    sees_itself: bool = False

    def __post_init__(self) -> None:
        if self.sides is not None and self.sides[0] * self.sides[1] != self.tokens:
            raise AssertionError(f"an image of {self.tokens} tokens cannot be a grid of {self.sides}")

    @property
    def end(self) -> int:
        return self.begin + self.tokens

    @property
    def positions(self) -> int:
        """The distance from the image's first token to the next token after it, in positions."""
        return self.tokens if self.sides is None else max(self.sides)


@dataclass(frozen=True)
class ImagePixels:
    """The input of a vision tower for the images of a micro-batch, in the order of `RowMedia.images`.

    values: float, the family's `pixel_values`: [patches of all images, numbers of a patch] for Qwen's, [I, 3, height,
        width] for families of one size, [tiles of all images, 3, height, width] for LLaVA-NeXT.
    grids_I3: int64, frames, height and width of each image in patches (`image_grid_thw`), for Qwen's; else None.
    cuts_I3: int64, how many tiles each image is cut into, and its own height and width in pixels (`image_sizes`), for
        families that put the features of its tiles together again (LLaVA-NeXT); else None.
    known: which images are kept as features (`kept_features`): the others above are then of the rest alone; None: they
        are of all.
    """

    values: torch.Tensor
    grids_I3: torch.Tensor | None = None
    cuts_I3: torch.Tensor | None = None
    known: KnownPictures | None = None

    @property
    def counts(self) -> list[int]:
        """The number of `values` of each image."""
        if self.cuts_I3 is not None:
            return self.cuts_I3[:, 0].tolist()
        return [1] * len(self.values) if self.grids_I3 is None else self.grids_I3.prod(1).tolist()


def joined_pixels(parts: Sequence[ImagePixels]) -> ImagePixels:
    """Return the pixels of images, in their order. ValueError without any."""
    grids = [part.grids_I3 for part in parts if part.grids_I3 is not None]
    cuts = [part.cuts_I3 for part in parts if part.cuts_I3 is not None]
    return ImagePixels(
        torch.cat([part.values for part in parts]),
        torch.cat(grids) if grids else None,
        torch.cat(cuts) if cuts else None,
    )


def positions_taken(length: int, images: Sequence[ImageSpan]) -> int:
    """Return the position of the token after a sequence of `length` tokens whose first is at 0."""
    return length - sum(image.tokens - image.positions for image in images)


def position_axes(length: int, images: Sequence[ImageSpan]) -> torch.Tensor:
    """Return int64 [3, T]: the positions of a sequence of `length` tokens along time, height and width, from 0.

    Worked example: two tokens of text, an image of 2 x 3 tokens, two tokens of text:
        time    0 1  2 2 2 2 2 2  5 6
        height  0 1  2 2 2 3 3 3  5 6
        width   0 1  2 3 4 2 3 4  5 6
    A text is alike on all axes. An image has one time, and the text goes on after its longer side.
    """
    axes_3T = torch.arange(length).repeat(3, 1)
    for image in images:
        if image.sides is None:
            continue
        height, width = image.sides
        first = int(axes_3T[0, image.begin])
        axes_3T[:, image.end :] -= image.tokens - image.positions
        axes_3T[0, image.begin : image.end] = first
        axes_3T[1, image.begin : image.end] = first + torch.arange(height).repeat_interleave(width)
        axes_3T[2, image.begin : image.end] = first + torch.arange(width).repeat(height)
    return axes_3T


def left_padded_axes(mask_BP: torch.Tensor, images: Sequence[Sequence[ImageSpan]]) -> torch.Tensor:
    """Return int64 [3, B, P]: `position_axes` of left-padded sequences, 0 at padding. B sequences, P tokens.

    mask_BP: bool, False at padding. images: of each sequence, counted from its first token.
    """
    count, width = mask_BP.shape
    axes_3BP = torch.zeros(3, count, width, dtype=torch.int64)
    for row, (length, own) in enumerate(zip(mask_BP.sum(1).tolist(), images, strict=True)):
        axes_3BP[:, row, width - length :] = position_axes(length, own)
    return axes_3BP.to(mask_BP.device)


def media_between(images: Sequence[ImageSpan], begin: int, end: int) -> tuple[ImageSpan, ...]:
    """Return the images of the tokens [begin, end) of a sequence, counted from `begin`; AssertionError if that cuts
    one."""
    inside = [image for image in images if image.begin < end and image.end > begin]
    if any(image.begin < begin or image.end > end for image in inside):
        raise AssertionError(f"the tokens {begin} to {end} cut an image")
    return tuple(replace(image, begin=image.begin - begin) for image in inside)
