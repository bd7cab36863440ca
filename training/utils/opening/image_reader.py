"""What reads the images of rows for a model that is named, not loaded, and what is saved of it beside a trained one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training.utils.data.images.reader import ImageReader, open_image_reader, unread_because
from training.utils.loading.adapter_folders import model_of
from training.utils.loading.configurations import load_config
from training.utils.models.processors import processor_files
from training.utils.models.vision import is_vision_config
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


def reader_of_model(name_or_path: str, trust_remote_code: bool, tokenizer: Any) -> ImageReader | None:
    """The reader for the model that a run starts from, or an adapter's; None for one that reads text alone."""
    path = model_of(name_or_path)
    return open_image_reader(path, load_config(path, trust_remote_code), tokenizer)


def why_unread(name_or_path: str, trust_remote_code: bool = False) -> str:
    """Why the images of rows are not read for a model that has no reader: ends "a row holds images, and ..."."""
    path = model_of(name_or_path)
    try:
        config = load_config(path, trust_remote_code)
    except ThreestepError:  # a tokenizer alone
        return unread_because(None, path)
    return unread_because(config if is_vision_config(config) else None, path)


def processor_of(name_or_path: str, model: Any) -> list[Path]:
    """The files of the image processor of the model that `model` started from; none of a model of text."""
    return processor_files(model_of(name_or_path)) if is_vision_config(model.config) else []
