"""What reads the images of rows for a model that is named, not loaded."""

from __future__ import annotations

from typing import Any

from training.utils.data.images.reader import ImageReader, open_image_reader
from training.utils.loading.adapter_folders import model_of
from training.utils.loading.configurations import load_config
from training.utils.run.errors import ThreestepError


def reader_of_folder(name_or_path: str, tokenizer: Any) -> ImageReader | None:
    """The reader for a model's folder or hub name, or an adapter's; None for a tokenizer alone, and for a model that
    reads text alone."""
    try:
        path = model_of(name_or_path)
        config = load_config(path)
    except ThreestepError:  # a tokenizer alone
        return None
    return open_image_reader(path, config, tokenizer)
