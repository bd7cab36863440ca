"""The images of a batch of prompts on their way to a model. `pixels_of` decodes; knows no model and no files."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch

from threestep.plugins.images.kept_features import KeptFeatures, known_pictures
from threestep.plugins.images.pixels import ImagePixels
from training.utils.contracts.documents import MediaSpan, media_between, positions_taken
from training.utils.contracts.token_rows import position_axes

PixelsOf = Callable[[Sequence[int]], ImagePixels]
_SEES_ITSELF = "token_type_ids"  # 1 where a token is of an image that sees itself (Gemma 3, transformers 5.19)


@dataclass(frozen=True)
class PromptImages:
    """The images of a batch of prompts.

    spans: of each prompt, counted from its first token. pixels_of, kept: see `RowImages`.
    """

    spans: tuple[tuple[MediaSpan, ...], ...]
    pixels_of: PixelsOf
    kept: KeptFeatures | None = None

    @property
    def pixels(self) -> ImagePixels:
        """Pixels of all their images, or of those whose features are not kept yet."""
        return pixels_of_keys([[image.key for image in own] for own in self.spans], self.pixels_of, self.kept)

    def positions(self, mask_BP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return [B, 1], the position of the token behind each left-padded prompt; and the positions of their tokens
        [3, B, P], if an image counts by its sides (M-RoPE). int64."""
        lengths = mask_BP.sum(1).tolist()
        taken = [positions_taken(length, own) for length, own in zip(lengths, self.spans, strict=True)]
        by_sides = any(image.sides for own in self.spans for image in own)
        taken_B1 = torch.tensor(taken, device=mask_BP.device).unsqueeze(1)
        return taken_B1, left_padded_axes(mask_BP, self.spans) if by_sides else None

    def forward_kwargs(self, model: Any, mask_BP: torch.Tensor, accepted: Container[str]) -> dict[str, Any]:
        """Return the arguments of the model's forward for the images of left-padded prompts. accepted: by name.

        The family makes the mask, as for prompts of text: of images whose tokens all see each other (Gemma 3) it is
        told which these are.
        """
        device, width = mask_BP.device, mask_BP.shape[1]
        given = self.pixels.inputs(model, device)
        if _SEES_ITSELF in accepted:
            types_BP = torch.zeros(mask_BP.shape, dtype=torch.int64)
            for row, (length, own) in enumerate(zip(mask_BP.sum(1).tolist(), self.spans, strict=True)):
                for image in own:
                    first = width - length + image.begin
                    types_BP[row, first : first + image.tokens] = image.sees_itself
            given[_SEES_ITSELF] = types_BP.to(device)
        return given

    def picked(self, prompts: Sequence[int]) -> PromptImages:
        """Return those of the prompts with these indices."""
        return replace(self, spans=tuple(self.spans[index] for index in prompts))

    def in_parts(self, length: int, most: int) -> Iterator[tuple[int, int, PromptImages]]:
        """Yield the only prompt, of `length` tokens, in parts of at most `most`: its first token, its end, its images.
        No picture is cut: one of more tokens is a part by itself."""
        (spans,) = self.spans
        pictures = [list(own) for _, own in groupby(spans, key=lambda image: image.key)]
        ends, begin = [(own[0].begin, own[-1].end) for own in pictures], 0
        while begin < length:
            end = min(begin + most, length)
            for first, last in ends:
                if first < end < last:
                    end = first if first > begin else last
            yield begin, end, replace(self, spans=(media_between(spans, begin, end),))
            begin = end

    def repeated(self, samples_per_prompt: int) -> tuple[tuple[MediaSpan, ...], ...]:
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


def left_padded_axes(mask_BP: torch.Tensor, media: Sequence[Sequence[MediaSpan]]) -> torch.Tensor:
    """Return int64 [3, B, P]: `position_axes` of left-padded sequences, 0 at padding. B sequences, P tokens.

    mask_BP: bool, False at padding. media: of each sequence, counted from its first token.
    """
    count, width = mask_BP.shape
    axes_3BP = torch.zeros(3, count, width, dtype=torch.int64)
    for row, (length, own) in enumerate(zip(mask_BP.sum(1).tolist(), media, strict=True)):
        axes_3BP[:, row, width - length :] = position_axes(length, own)
    return axes_3BP.to(mask_BP.device)
