"""The images of a record's sequences: what a model is given of them, and small copies to look at.

I images of a sequence, X their patches or tiles. Knows no files.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from threestep.plugins.images.pixels import ImagePixels, pixel_inputs
from training.utils.base.storage import read_json_object

_TYPES = ("mm_token_type_ids", "token_type_ids")  # 1 where a token is of an image, 0 elsewhere (transformers 5.19)
_LONGEST_SIDE = 128  # pixels, as of the report's


class PixelScale(NamedTuple):
    """The mean and the standard deviation of each colour that an image processor takes away and divides by."""

    mean: list[float]
    deviation: list[float]


def scale_of(folder: Path) -> PixelScale | None:
    """The scale of the image processor in a model's folder; None without one."""
    found = read_json_object(str(folder / "preprocessor_config.json")) or {}
    known = "image_mean" in found and "image_std" in found
    return PixelScale(found["image_mean"], found["image_std"]) if known else None


@dataclass(frozen=True)
class RecordedImages:
    """The images of one sequence. begins_I, tokens_I: where their tokens stand. counts_I: values of each. grids_I3,
    cuts_I3: as `ImagePixels` has them. values_XN: flattened."""

    begins_I: np.ndarray
    tokens_I: np.ndarray
    counts_I: np.ndarray
    grids_I3: np.ndarray | None
    cuts_I3: np.ndarray | None
    values_XN: np.ndarray

    def inputs(self, config: Any, tokens: int, accepted: Container[str], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return the arguments of a family's forward. config: of the model. tokens: that it reads. accepted: names of
        arguments."""
        values = torch.from_numpy(self.values_XN).to(dtype)
        if self.grids_I3 is None:
            values = values.view(-1, 3, *[_side(values.shape[1])] * 2)
        grids, cuts = (None if each is None else torch.from_numpy(each) for each in (self.grids_I3, self.cuts_I3))
        types_1T = torch.zeros(1, tokens, dtype=torch.int64)
        for begin, count in zip(self.begins_I, self.tokens_I, strict=True):
            types_1T[0, begin : begin + count] = 1
        given = pixel_inputs(config, ImagePixels(values, grids, cuts))
        return given | {name: types_1T for name in _TYPES if name in accepted}

    def shown(self, config: Any, scale: PixelScale | None) -> list[str]:
        """Return each image as the address of a picture on a page: as the model was given it, of tiles the first.

        config: of the model. scale: None: from the least to the largest value.
        """
        merged = getattr(config.vision_config, "spatial_merge_size", 1)  # of values that are patches: a token's side
        parts = np.split(self.values_XN, np.cumsum(self.counts_I)[:-1])
        if self.grids_I3 is None:
            side = _side(self.values_XN.shape[1])
            return [_address(part[0].reshape(3, side, side), scale) for part in parts]
        return [_address(_joined(part, grid, merged), scale) for part, grid in zip(parts, self.grids_I3, strict=True)]


def images_of_rank(rank: Mapping[str, np.ndarray]) -> dict[int, RecordedImages]:
    """Return, by the sequence of a rank's record, the images of those that have some."""
    if "media_begins" not in rank:
        return {}
    ends = np.cumsum(rank["lengths"])
    sequence_I = np.searchsorted(ends, rank["media_begins"], side="right")
    first_I = np.cumsum(rank["media_counts"]) - rank["media_counts"]
    found = {}
    for sequence in np.unique(sequence_I).tolist():
        own_I = np.flatnonzero(sequence_I == sequence)
        grids_I3, cuts_I3 = (rank[name][own_I] if name in rank else None for name in ("media_grids", "media_cuts"))
        places = [np.arange(first_I[index], first_I[index] + rank["media_counts"][index]) for index in own_I]
        found[sequence] = RecordedImages(
            rank["media_begins"][own_I] - (ends[sequence] - rank["lengths"][sequence]),
            rank["media_tokens"][own_I],
            rank["media_counts"][own_I],
            grids_I3,
            cuts_I3,
            rank["media_values"][np.concatenate(places)],
        )
    return found


def _side(numbers: int) -> int:
    """Return the side of a square of three colours."""
    return round((numbers / 3) ** 0.5)


def _joined(values_XN: np.ndarray, grid: np.ndarray, merged: int) -> np.ndarray:
    """Return [3, height, width] of the patches of an image, which stand token by token, each `merged` x `merged` of
    them; of a patch the numbers are 3 colours of some frames, of which the first is taken (Qwen2-VL's processor)."""
    _, high, wide = grid.tolist()
    frames, side = 2, _side(values_XN.shape[1] // 2)
    if 3 * frames * side * side != values_XN.shape[1]:
        frames, side = 1, _side(values_XN.shape[1])
    own = values_XN[: high * wide].reshape(high // merged, wide // merged, merged, merged, 3, frames, side, side)
    return own[..., 0, :, :].transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, high * side, wide * side)


def _address(colours_3HW: np.ndarray, scale: PixelScale | None) -> str:
    from PIL import Image

    if scale is None:
        low, high = float(colours_3HW.min()), float(colours_3HW.max())
        shares_3HW = (colours_3HW - low) / ((high - low) or 1.0)
    else:
        mean, deviation = (np.array(each).reshape(-1, 1, 1) for each in scale)
        shares_3HW = colours_3HW * deviation + mean
    small = Image.fromarray(np.rint(255.0 * shares_3HW.clip(0.0, 1.0)).astype(np.uint8).transpose(1, 2, 0))
    small.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE))
    file = io.BytesIO()
    small.save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
