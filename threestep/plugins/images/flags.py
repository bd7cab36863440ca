"""Flags of images, which every step has."""

from __future__ import annotations

from dataclasses import dataclass

from training.utils.flags.flags import flag


@dataclass(frozen=True)
class ImageArguments:
    """Flags of a run whose rows may have images."""

    kept_image_features_mb: int = flag(
        0,
        "Models of images and text: MiB of host memory for what a frozen vision tower makes of pictures, so that it "
        "runs once for a picture and not in every epoch; 0 keeps nothing.",
        "mib >= 0",
        topic="memory",
    )
