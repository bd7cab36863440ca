"""The arguments of a model's forward for images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training.utils.base.transfer import moved

if TYPE_CHECKING:
    import torch

    from training.utils.images.spans import ImagePixels

FEATURE_READER = "_threestep_kept_features"  # attribute of a model that reads kept features
# Families whose forward takes the pictures of each row, [rows, I, 3, height, width].
_PICTURES_BY_ROW = ("idefics2", "idefics3", "smolvlm")


def image_inputs(model: Any, pixels: ImagePixels, device: torch.device) -> dict[str, Any]:
    """Return the arguments of forward for the images of a micro-batch or of prompts: features where some are kept and
    `model` reads them (`open_feature_reader`), else pixels."""
    if pixels.known is None:
        return pixel_inputs(model.config, moved(pixels, device))
    reader: Any = getattr(model, FEATURE_READER, None)
    if reader is None:
        return pixel_inputs(model.config, moved(pixels.known.all_pixels(), device))
    pixels = moved(pixels, device)
    assert pixels.known is not None
    return reader.inputs(pixels, pixels.known)


def pixel_inputs(config: Any, pixels: ImagePixels) -> dict[str, torch.Tensor]:
    """Return the arguments of a family's forward for the pixels of images. config: of the model."""
    by_row = config.model_type in _PICTURES_BY_ROW
    given = {"pixel_values": pixels.values.unsqueeze(0) if by_row else pixels.values}
    if pixels.grids_I3 is not None:
        given["image_grid_thw"] = pixels.grids_I3
    if pixels.cuts_I3 is not None:
        given["image_sizes"] = pixels.cuts_I3[:, 1:]
    return given
