"""The images of a batch of prompts on their way to a model. `pixels_of` decodes; knows no model and no files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch

from training.utils.images.kept_features import KeptFeatures, known_pictures
from training.utils.images.spans import ImagePixels, ImageSpan

PixelsOf = Callable[[Sequence[int]], ImagePixels]


@dataclass(frozen=True)
class PromptImages:
    """The images of a batch of prompts.

    spans: of each prompt, counted from its first token. pixels_of, kept: see `RowImages`.
    """

    spans: tuple[tuple[ImageSpan, ...], ...]
    pixels_of: PixelsOf
    kept: KeptFeatures | None = None

    @property
    def pixels(self) -> ImagePixels:
        """Pixels of all their images, or of those whose features are not kept yet."""
        return pixels_of_keys([[image.key for image in own] for own in self.spans], self.pixels_of, self.kept)

    def picked(self, prompts: Sequence[int]) -> PromptImages:
        """Return those of the prompts with these indices."""
        return replace(self, spans=tuple(self.spans[index] for index in prompts))

    def repeated(self, samples_per_prompt: int) -> tuple[tuple[ImageSpan, ...], ...]:
        """Return the spans of each sequence, where a prompt has so many adjacent ones."""
        return tuple(own for own in self.spans for _ in range(samples_per_prompt))


def pixels_of_keys(keys: Sequence[Sequence[int]], pixels_of: PixelsOf, kept: KeptFeatures | None) -> ImagePixels:
    """Return the pixels of images, or of those whose features are not kept yet.

    keys: of the images of each document.
    """
    decode = partial(pixels_of, list(chain.from_iterable(keys)))
    if kept is None:
        return decode()
    known = known_pictures(keys, kept, decode)
    missing = [key for key, spans in known.missing for _ in range(spans)]
    pixels = pixels_of(missing) if missing else ImagePixels(torch.empty(0))
    return replace(pixels, known=known)
