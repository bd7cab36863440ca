"""Models that are named, not loaded: whether they read pictures alike, and what one reads of a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from threestep.plugins.images.data.reader import open_image_reader
from training.utils.base.errors import ThreestepError
from training.utils.loading.configurations import load_config
from training.utils.loading.tokenizers import load_tokenizer, same_tokenizer
from training.utils.loading.weight_files import model_of

if TYPE_CHECKING:
    from threestep.plugins.images.pixels import ImagePixels
    from training.utils.contracts.media import MediaReader

_SIDE = 448  # of the picture that stands for all where none is read yet


def picture_of_model(name_or_path: str, trust_remote_code: bool) -> tuple[ImagePixels, int] | None:
    """The pixels of a picture of 448 x 448, as the processor of a model's folder or hub name makes them, and how many
    tokens it takes; None without files of tokenizer and image processor. The model is one of images and text."""
    path = model_of(name_or_path)
    config = load_config(path, trust_remote_code)
    try:
        reader = open_image_reader(path, config, load_tokenizer(path, end_may_pad=True))
    except ThreestepError:  # a configuration alone
        return None
    if reader is None:
        return None
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (_SIDE, _SIDE)).save(file, "PNG")
    return reader.pixels(file.getvalue()), reader.text_of(file.getvalue(), "a picture").tokens


def why_unscored(
    name_or_path: str, tokenizer: Any, reader: MediaReader | None, sides: Sequence[tuple[Any, MediaReader]]
) -> str | None:
    """See `MediaKind`."""
    if reader is None:
        return f"the reward model '{name_or_path}' reads only text, or its folder has no image processor"
    if not all(same_tokenizer(tokenizer, own) for own, _ in sides):
        return f"the reward model '{name_or_path}' has a different tokenizer from the model that answers about images"
    if any(reader.parts() != own.parts() for _, own in sides):
        return (
            f"the reward model '{name_or_path}' has different image processor settings (preprocessor_config.json) "
            "from the model that answers about images"
        )
    return None


def check_read_alike(paths: tuple[str, str], readers: tuple[MediaReader, MediaReader]) -> None:
    """ThreestepError if actor and critic were made with image processors of other settings: pixels are the actor's."""
    actor, critic = readers
    if actor.parts() != critic.parts():
        raise ThreestepError(
            f"the image processors (preprocessor_config.json) of --actor_model_name_or_path '{paths[0]}' and "
            f"--critic_model_name_or_path '{paths[1]}' differ, so the reward model would not see the pixels it was "
            "trained on; train step 2 from a model with the actor's image processor"
        )
