"""The reader of images in rows for a model that is named, not loaded, and its files beside a trained model."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError
from training.utils.images.data.reader import ImageReader, open_image_reader, unread_because
from training.utils.loading.adapter_folders import model_of
from training.utils.loading.configurations import load_config
from training.utils.loading.tokenizers import load_tokenizer
from training.utils.models.families.parts import is_media_config
from training.utils.models.families.processors import processor_files

if TYPE_CHECKING:
    from training.utils.images.spans import ImagePixels

_SIDE = 448  # of the picture that stands for all where none is read yet


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
    return unread_because(config if is_media_config(config) else None, path)


def picture_of_model(name_or_path: str, trust_remote_code: bool) -> tuple[ImagePixels, int] | None:
    """The pixels of a picture of 448 x 448, as the processor of a model's folder or hub name makes them, and how many
    tokens it takes; None for a model of text, and without files of tokenizer and image processor."""
    path = model_of(name_or_path)
    if not is_media_config(load_config(path, trust_remote_code)):
        return None
    try:
        reader = reader_of_model(path, trust_remote_code, load_tokenizer(path, end_may_pad=True))
    except ThreestepError:  # a configuration alone
        return None
    if reader is None:
        return None
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (_SIDE, _SIDE)).save(file, "PNG")
    return reader.pixels(file.getvalue()), reader.text_of(file.getvalue(), "a picture").tokens


def processor_of(name_or_path: str, model: Any) -> list[Path]:
    """The files of the image processor of the model that `model` started from; none of a model of text."""
    return processor_files(model_of(name_or_path)) if is_media_config(model.config) else []
