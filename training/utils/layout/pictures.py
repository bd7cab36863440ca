"""The images of a run's rows on their way to a model: pixels for rows that are laid out, and an image for a micro-batch
that has none.

Knows no model and no files: `pixels_of` decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice
from typing import TYPE_CHECKING

import torch

from training.utils.contracts.documents import Document, plain
from training.utils.images.prompts import PixelsOf, PromptImages, pixels_of_keys
from training.utils.layout.rows import packed_rows

if TYPE_CHECKING:
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.images.kept_features import KeptFeatures
    from training.utils.images.spans import ImageSpan
    from training.utils.layout.planner import MicroBatch


@dataclass(frozen=True)
class RowImages:
    """pixels_of: decodes the images of these keys, in their order.
    examples: a few short documents of one sequence with images, by which a model is read before training.
    kept: features of pictures, of a model that reads them; None where it reads all pixels in every forward.
    """

    pixels_of: PixelsOf
    examples: tuple[Document, ...]
    kept: KeptFeatures | None = None

    @cached_property
    def alone(self) -> Document:
        """The smallest picture of the examples by itself, with nothing to predict. One that was cut up has all its
        parts, and the tokens between them."""
        parts = [segment.tokens for document in self.examples for segment in document.segments]
        pictures = [
            (tokens, list(images))
            for tokens in parts
            for _, images in groupby(tokens.images, key=lambda image: image.key)
        ]
        tokens, images = min(pictures, key=lambda found: found[1][-1].end - found[1][0].begin)
        cut = tokens.part(images[0].begin, images[-1].end)
        return plain(replace(cut, is_target=torch.zeros_like(cut.is_target)))

    def of_prompts(self, spans: Sequence[tuple[ImageSpan, ...]]) -> PromptImages | None:
        """Return the images of prompts; None where none of them has one. spans: of each prompt."""
        return PromptImages(tuple(spans), self.pixels_of, self.kept) if any(spans) else None

    def with_pixels(self, rows: TokenRows) -> TokenRows:
        """Return the rows with the pixels of their images, or of those whose features are not kept yet."""
        if rows.media is None:
            return rows
        spans = iter(rows.media.images)
        keys = [[image.key for image in islice(spans, count)] for count in rows.media.counts]
        pixels = pixels_of_keys(keys, self.pixels_of, self.kept)
        return replace(rows, media=replace(rows.media, pixels=pixels))


def lacks_images(step: Sequence[Sequence[MicroBatch]], rank: int, seen: Sequence[bool]) -> list[bool]:
    """Return for each of a rank's micro-batches whether it has no image where that of another rank has one.

    Under ZeRO-3 the ranks gather a module's weights together, and below it they add up its gradients together: the
    tower must run on all ranks or on none.

    step: of `plan_step`. seen: for each document of the step, whether it has images.
    """
    found = [[any(seen[index] for row in rows for index in row) for rows in mine] for mine in step]
    return [any(column) and not column[rank] for column in zip(*found, strict=True)]


def laid_out(
    documents: Sequence[Sequence[Document]],
    pad_token_id: int,
    images: RowImages | None,
    lacks: bool = False,
    with_before: bool = False,
) -> TokenRows:
    """Return `packed_rows` with the pixels of their images.

    lacks: of `lacks_images`. The image that is then added is no sequence, and nothing sees it; it stands at the end of
        the last row where rows hold several documents, and else in a row of its own.
    """
    if images is None:
        return packed_rows(documents, pad_token_id, with_before=with_before)
    rows = [list(row) for row in documents]
    if lacks and any(len(row) > 1 for row in rows):
        rows[-1].append(images.alone)
    elif lacks:
        rows.append([images.alone])
    made = packed_rows(rows, pad_token_id, with_before=with_before)
    return images.with_pixels(replace(made, end_B=made.end_B[:-1]) if lacks else made)
