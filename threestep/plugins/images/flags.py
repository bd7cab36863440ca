"""Flags of images: of steps, and of every program that reads rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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


@dataclass
class ImageRowArguments:
    """Flags of what rows name as images."""

    topic: ClassVar[str] = "data"

    allow_image_urls: bool = flag(
        False,
        "Fetch the pictures of rows that name https addresses, of public hosts alone; without it only paths and bytes "
        "are read.",
    )
