"""Counts the tokens of a picture in LLaVA-NeXT and LLaVA-OneVision, which cut it into tiles and put their features
together again (Liu et al. 2024, "LLaVA-NeXT"; Li et al. 2024, "LLaVA-OneVision", section 3).

A picture is read whole, at the size of a tile, and cut up: it is fitted into the best of several grids of tiles. Of the
features of the grid those of the borders, where the picture does not fill it, are left out, and each line of the others
ends with a learned newline. Tokens of the whole picture come first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TileSizes:
    """grids: heights and widths in pixels that a picture may be fitted into (`image_grid_pinpoints`).
    tile: side of a tile in pixels. patches: side of a tile in patches.
    most_tiles: grids of more patches than 1.21 times those of so many tiles are made smaller; None: they stay.
    """

    grids: Sequence[Sequence[int]]
    tile: int
    patches: int
    most_tiles: int | None = None


def joined_tokens(sizes: TileSizes, height: int, width: int) -> int:
    """Return the tokens of a picture of so many pixels, but for those that a tower has before its patches."""
    from transformers.image_processing_utils import select_best_resolution

    grid_height, grid_width = select_best_resolution((height, width), [list(grid) for grid in sizes.grids])
    lines, columns = (side // sizes.tile * sizes.patches for side in (grid_height, grid_width))
    lines, columns = _without_borders(lines, columns, height, width)
    if sizes.most_tiles is not None:
        ratio = math.sqrt(lines * columns / (sizes.most_tiles * sizes.patches**2))
        if ratio > 1.1:
            lines, columns = int(lines // ratio), int(columns // ratio)
    return sizes.patches**2 + lines * (columns + 1)


def _without_borders(lines: int, columns: int, height: int, width: int) -> tuple[int, int]:
    """Return the lines and columns of a grid of patches that a picture of so many pixels reaches. Rounded as
    transformers does."""
    if width / height > columns / lines:
        return lines - (lines - int(round(height * (columns / width), 7))) // 2 * 2, columns
    return lines, columns - (columns - int(round(width * (lines / height), 7))) // 2 * 2
