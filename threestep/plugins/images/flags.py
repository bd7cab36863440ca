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
        "Image-text models: host memory in MiB for caching the frozen vision tower's features, so that it runs once "
        "per image, not once per epoch; 0 keeps none.",
        "mib >= 0",
        topic="memory",
    )


@dataclass
class ImageRowArguments:
    """Flags of what rows name as images."""

    topic: ClassVar[str] = "data"

    allow_image_urls: bool = flag(
        False,
        "Fetch images that rows specify as https URLs on public hosts; without this flag, only paths and bytes are "
        "read.",
    )
