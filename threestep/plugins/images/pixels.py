"""Pixels of images: what a vision tower takes, and the arguments of a model's forward for them.

I images of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from training.utils.base.transfer import moved

if TYPE_CHECKING:
    from threestep.plugins.images.kept_features import KnownPictures

FEATURE_READER = "_threestep_kept_features"  # attribute of a model that reads kept features
# Families whose forward takes the pictures of each row, [rows, I, 3, height, width].
_PICTURES_BY_ROW = ("idefics2", "idefics3", "smolvlm")


@dataclass(frozen=True)
class ImagePixels:
    """The input of a vision tower for the images of a micro-batch, in the order of `RowMedia.spans`.

    values: float, the family's `pixel_values`: [patches of all images, numbers of a patch] for Qwen's, [I, 3, height,
        width] for families of one size, [tiles of all images, 3, height, width] for LLaVA-NeXT.
    grids_I3: int64, frames, height and width of each image in patches (`image_grid_thw`), for Qwen's; else None.
    cuts_I3: int64, how many tiles each image is cut into, and its own height and width in pixels (`image_sizes`), for
        families that put the features of its tiles together again (LLaVA-NeXT); else None.
    known: which images are kept as features (`kept_features`): the others above are then of the rest alone; None: they
        are of all.
    """

    name: ClassVar[str] = "images"
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

    def inputs(self, model: Any, device: torch.device) -> dict[str, Any]:
        """Return the arguments of forward for the images of a micro-batch or of prompts: features where some are kept
        and `model` reads them (`open_feature_reader`), else pixels."""
        if self.known is None:
            return pixel_inputs(model.config, moved(self, device))
        reader: Any = getattr(model, FEATURE_READER, None)
        if reader is None:
            return pixel_inputs(model.config, moved(self.known.all_pixels(), device))
        pixels = moved(self, device)
        assert pixels.known is not None
        return reader.inputs(pixels, pixels.known)

    def recorded(self, places: Sequence[int]) -> dict[str, torch.Tensor]:
        """See `ReadMedia`."""
        pixels = self if self.known is None else self.known.all_pixels()
        parts = pixels.values.cpu().flatten(1).split(pixels.counts)
        sides = {"media_grids": pixels.grids_I3, "media_cuts": pixels.cuts_I3}
        recorded = {
            "media_counts": torch.tensor([len(parts[place]) for place in places], dtype=torch.int64),
            "media_values": torch.cat([parts[place] for place in places] or [parts[0][:0]]).float(),
        }
        return recorded | {name: sides_I3.cpu()[places] for name, sides_I3 in sides.items() if sides_I3 is not None}


def joined_pixels(parts: Sequence[ImagePixels]) -> ImagePixels:
    """Return the pixels of images, in their order. ValueError without any."""
    grids = [part.grids_I3 for part in parts if part.grids_I3 is not None]
    cuts = [part.cuts_I3 for part in parts if part.cuts_I3 is not None]
    return ImagePixels(
        torch.cat([part.values for part in parts]),
        torch.cat(grids) if grids else None,
        torch.cat(cuts) if cuts else None,
    )


def pixel_inputs(config: Any, pixels: ImagePixels) -> dict[str, torch.Tensor]:
    """Return the arguments of a family's forward for the pixels of images. config: of the model."""
    by_row = config.model_type in _PICTURES_BY_ROW
    given = {"pixel_values": pixels.values.unsqueeze(0) if by_row else pixels.values}
    if pixels.grids_I3 is not None:
        given["image_grid_thw"] = pixels.grids_I3
    if pixels.cuts_I3 is not None:
        given["image_sizes"] = pixels.cuts_I3[:, 1:]
    return given
