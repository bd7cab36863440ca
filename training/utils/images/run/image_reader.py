"""The reader of images in rows for a model that is named, not loaded, and its files beside a trained model."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError
from training.utils.images.data.reader import ImageReader, open_image_reader, unread_because
from training.utils.loading.adapter_folders import model_of
from training.utils.loading.configurations import load_config
from training.utils.loading.tokenizers import load_tokenizer, same_tokenizer
from training.utils.models.families.parts import is_media_config
from training.utils.models.families.processors import processor_files

if TYPE_CHECKING:
    from training.utils.contracts.media import MediaReader
    from training.utils.images.spans import ImagePixels

_SIDE = 448  # of the picture that stands for all where none is read yet


def reader_of_folder(name_or_path: str, tokenizer: Any) -> ImageReader | None:
    """The reader for a model's folder or hub name, or an adapter's; None for a tokenizer alone, and for a model that
    reads text alone."""
    try:
        path = model_of(name_or_path)
        config = load_config(path)
    except ThreestepError:
        if Path(name_or_path, "config.json").is_dir():
            raise
        return None  # a tokenizer alone
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


def why_unscored(name_or_path: str, sides: Sequence[tuple[Any, MediaReader]]) -> str | None:
    """Return why a reward model does not score answers about pictures; None where it does.

    sides: tokenizer of each model that answers, and the reader of its pictures.
    """
    tokenizer = load_tokenizer(name_or_path, end_may_pad=True)
    reader = reader_of_folder(name_or_path, tokenizer)
    if reader is None:
        return f"the reward model '{name_or_path}' reads text alone, or its folder has no image processor"
    if not all(same_tokenizer(tokenizer, own) for own, _ in sides):
        return f"the reward model '{name_or_path}' has another tokenizer than the model that answers about pictures"
    if any(reader.parts() != own.parts() for _, own in sides):
        return (
            f"the reward model '{name_or_path}' has other settings of its image processor (preprocessor_config.json) "
            "than the model that answers about pictures"
        )
    return None


def check_scored(name_or_path: str, sides: Sequence[tuple[Any, MediaReader]]) -> None:
    """ThreestepError if a reward model does not score answers about the pictures of rows. sides: see `why_unscored`."""
    unread = why_unscored(name_or_path, sides)
    if unread is not None:
        raise ThreestepError(
            f"--reward contains the reward model, and rows of the data have images: {unread}; give another, a rule "
            "(--reward exact_match) or a function"
        )


def check_read_alike(paths: tuple[str, str], trust_remote_code: bool, tokenizers: Sequence[Any]) -> None:
    """ThreestepError if actor and critic were made with image processors of other settings: pixels are the actor's."""
    readers = [reader_of_model(path, trust_remote_code, own) for path, own in zip(paths, tokenizers, strict=True)]
    actor, critic = (reader and reader.parts() for reader in readers)
    if actor is not None and critic is not None and actor != critic:
        raise ThreestepError(
            f"the image processors (preprocessor_config.json) of --actor_model_name_or_path '{paths[0]}' and "
            f"--critic_model_name_or_path '{paths[1]}' differ: the reward model would see other pixels than it was "
            "trained on; train step 2 from a model with the actor's"
        )
