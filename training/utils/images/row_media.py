"""Images in rows that are laid out: their positions, which of their tokens see each other, and their pixels.

N rows, T tokens in a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from training.utils.base.errors import ThreestepError
from training.utils.images.spans import ImagePixels, ImageSpan, position_axes


class MediaRun(NamedTuple):
    """The images of a segment that begins at `column` of row `row`, at position `first_position`."""

    row: int
    column: int
    tokens: int
    first_position: int
    images: tuple[ImageSpan, ...]


@dataclass(frozen=True)
class RowMedia:
    """The images of rows.

    axes_3NT: int64, positions along time, height and width, which replace `position_ids_NT`; None unless an image
        counts by its sides.
    blocks_NT: int64, a number above 0 for each image whose tokens all see each other, 0 elsewhere; None without such
        images.
    images: in the order of their tokens, row by row. An image of a shared prompt is there once.
    counts: how many of these each document has.
    places: flat position n*T+t of the first token of each image.
    pixels: of these images; given to the rows by what decodes them.
    """

    axes_3NT: torch.Tensor | None
    blocks_NT: torch.Tensor | None
    images: tuple[ImageSpan, ...]
    counts: tuple[int, ...]
    places: tuple[int, ...] = ()
    pixels: ImagePixels | None = None

    def inputs(self, model: Any, device: torch.device) -> dict[str, Any]:
        """Return the arguments of a model's forward for the images."""
        assert self.pixels is not None, "an image without pixels would be read as a text"
        from training.utils.images.inputs import image_inputs  # rows that are laid out do without

        return image_inputs(model, self.pixels, device)

    def recorded(self, places: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the images of sequences by a record's names, one sequence after the other. places: [T] of each
        sequence's tokens, flat positions that rise."""
        assert self.pixels is not None, "a record holds what the model read"
        pixels = self.pixels if self.pixels.known is None else self.pixels.known.all_pixels()
        parts = pixels.values.cpu().flatten(1).split(pixels.counts)
        sides = {"media_grids": pixels.grids_I3, "media_cuts": pixels.cuts_I3}
        begins, held, begin = [], [], 0
        for own in places:
            found = torch.searchsorted(own, torch.tensor(self.places)).tolist()
            for index, place in enumerate(found):
                if place < len(own) and int(own[place]) == self.places[index]:
                    begins.append(begin + place)
                    held.append(index)
            begin += len(own)
        recorded = {
            "media_begins": torch.tensor(begins, dtype=torch.int64),
            "media_tokens": torch.tensor([self.images[index].tokens for index in held], dtype=torch.int64),
            "media_counts": torch.tensor([len(parts[index]) for index in held], dtype=torch.int64),
            "media_values": torch.cat([parts[index] for index in held]).float() if held else parts[0][:0].float(),
        }
        return recorded | {name: sides_I3.cpu()[held] for name, sides_I3 in sides.items() if sides_I3 is not None}

    @property
    def positions(self) -> dict[str, torch.Tensor]:
        """The argument of forward that replaces the positions of a text."""
        return {} if self.axes_3NT is None else {"position_ids": self.axes_3NT}

    def refuse_attention(self, implementation: str, expected: Sequence[str]) -> None:
        """Raise ThreestepError for an attention of all rows as one, which the positions would not fit into."""
        *first, last = expected
        raise ThreestepError(
            f"rows with images expect --attn_implementation {', '.join(first)} or {last}, got {implementation}"
        )

    def refuse_noise(self) -> None:
        """Raise ThreestepError: without ids, transformers finds the places of images by comparing embeddings."""
        raise ThreestepError("noise on the embeddings would hide the places of images; leave --neftune_alpha out")


def media_of_rows(documents: Iterable[list[MediaRun]], position_ids_NT: torch.Tensor) -> RowMedia | None:
    """Return the images of the segments of each document; None without any."""
    by_document = list(documents)
    runs = [run for own in by_document for run in own]
    images = tuple(image for run in runs for image in run.images)
    if not images:
        return None
    return RowMedia(
        axes_3NT=_axes(runs, position_ids_NT) if any(image.sides for image in images) else None,
        blocks_NT=_blocks(runs, position_ids_NT) if any(image.sees_itself for image in images) else None,
        images=images,
        counts=tuple(sum(len(run.images) for run in own) for own in by_document),
        places=tuple(
            run.row * position_ids_NT.shape[1] + run.column + image.begin for run in runs for image in run.images
        ),
    )


def _axes(runs: list[MediaRun], position_ids_NT: torch.Tensor) -> torch.Tensor:
    """Return `RowMedia.axes_3NT`; padding is where `position_ids_NT` has it."""
    axes_3NT = position_ids_NT.repeat(3, 1, 1)
    for run in runs:
        axes_3T = run.first_position + position_axes(run.tokens, run.images)
        axes_3NT[:, run.row, run.column : run.column + run.tokens] = axes_3T
    return axes_3NT


def _blocks(runs: list[MediaRun], position_ids_NT: torch.Tensor) -> torch.Tensor:
    """Return `RowMedia.blocks_NT`."""
    blocks_NT, number = torch.zeros_like(position_ids_NT), 0
    for run in runs:
        for image in run.images:
            if image.sees_itself:
                number += 1
                blocks_NT[run.row, run.column + image.begin : run.column + image.end] = number
    return blocks_NT
