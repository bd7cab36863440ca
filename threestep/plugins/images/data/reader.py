"""A picture as a model reads it: the text that stands for it among the tokens, and its pixels.

The image processor is that of the model's folder, by Pillow: torchvision's resizes otherwise, so the two are never
mixed. A picture is decoded whole when its row is made, so that no damaged one is met during training, and again each
time its pixels are asked for.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from threestep.plugins.images.data.decoding import decoded
from threestep.plugins.images.data.families import (
    ImageFamily,
    ImageText,
    family_of,
    known_families,
    knows,
    pixels_of_picture,
)
from threestep.plugins.images.data.row_pictures import RowPictures
from threestep.plugins.images.data.shown import ShownImage, counting_placeholders, shown_images
from threestep.plugins.images.flags import ImageRowArguments
from threestep.plugins.images.pixels import ImagePixels, joined_pixels
from training.utils.base.errors import ThreestepError, first_line
from training.utils.data.files.digests import hash_text
from training.utils.data.formats.media import BadConversation

if TYPE_CHECKING:
    from training.utils.contracts.documents import MediaSpan
    from training.utils.contracts.media import ReadsMedia
    from training.utils.data.rows.media_store import GrowingStore
    from training.utils.flags.added import AddedFlags

_SETTINGS = ("preprocessor_config.json", "processor_config.json")
_SIZES_KEPT = 4096  # whose texts are not measured anew


class ImageReader:
    """Pictures for models of one family, by one image processor of transformers."""

    def __init__(self, family: ImageFamily, processor: Any, model_type: str) -> None:
        self.family = family
        self.model_type = model_type
        self._processor = processor
        self._own = _own_processor(family, processor, model_type)
        self._text_of_size = lru_cache(_SIZES_KEPT)(self._measured)

    @property
    def sentence(self) -> str:
        """One line for a log."""
        compared = "transformers has no processor to check their tokens against"
        if self._own is not None:
            compared = f"their tokens are checked against those of {type(self._own).__name__}"
        return f"images: prepared by {type(self._processor).__name__}; {compared}"

    def parts_of_rows(self, flags: AddedFlags) -> dict[str, str]:
        """Settings that rows depend on, for the cache's fingerprint."""
        return {**self.parts(), "image urls": str(flags.of(ImageRowArguments).allow_image_urls)}

    def of_rows(self, store: GrowingStore, flags: AddedFlags) -> ReadsMedia:
        """A reader of the images of rows that stores their pictures."""
        return RowPictures(self, store, flags.of(ImageRowArguments).allow_image_urls)

    def of_stored(self, pictures: EncodedPictures) -> PixelReader:
        """The pixels of stored pictures."""
        return PixelReader(self, pictures)

    def parts(self) -> dict[str, str]:
        """The image processor and its settings, in words."""
        settings = json.dumps(self._processor.to_dict(), sort_keys=True, default=str)
        return {"image processor": f"{type(self._processor).__name__} {hash_text(settings)}"}

    def counting(self, decode: Callable[[Sequence[int]], str]) -> Callable[[Sequence[int]], str]:
        """See `counting_placeholders`."""
        return counting_placeholders(decode, self.family.placeholder)

    def text_of(self, data: bytes, where: str) -> ImageText:
        """The text of an encoded picture. Raises BadConversation for one that cannot be decoded, or that the image
        processor refuses (Qwen's: sides of which one is over 200 times the other)."""
        picture = decoded(data, where)
        try:
            return self._text_of_size(picture.height, picture.width)
        except ThreestepError:
            raise
        except Exception as error:  # whatever a processor raises
            raise BadConversation(
                f"{where}: an image of {picture.width} x {picture.height} pixels cannot be prepared for the model: "
                f"{first_line(error)}; store it in another shape, or remove the row"
            ) from error

    def pixels(self, data: bytes) -> ImagePixels:
        """The input of a vision tower for one encoded picture."""
        return pixels_of_picture(self._features(decoded(data, "an image of the cache")))

    def _features(self, picture: Any) -> Mapping[str, Any]:
        return self._processor(images=[picture], return_tensors="np", **self.family.asked)

    def _measured(self, height: int, width: int) -> ImageText:
        """The text of all pictures of this size in pixels. ThreestepError if the family's own processor writes
        another."""
        from PIL import Image

        features = self._features(Image.new("RGB", (width, height)))
        text = self.family.read(features)
        own = text.text if self._own is None else self._own.replace_image_token(features, 0)
        if own != text.text:
            raise ThreestepError(
                f"for an image of {width} x {height} pixels, the model's config.json implies {text.tokens} tokens, "
                f"but {type(self._own).__name__} with the folder's preprocessor_config.json produces "
                f"{own.count(self.family.placeholder)}; the two files are from different models"
            )
        return text


def open_image_reader(name_or_path: str, config: Any, tokenizer: Any) -> ImageReader | None:
    """The reader of images for a model's folder or hub name; None where the model reads text alone, or has no settings
    of an image processor.

    config: of the model. ThreestepError without Pillow, and for a tokenizer without the family's tokens.
    """
    if not knows(config):
        return None
    try:
        from transformers import AutoImageProcessor

        processor = AutoImageProcessor.from_pretrained(
            name_or_path, backend="pil", config=config, trust_remote_code=False
        )
    except OSError as error:
        if not any((Path(name_or_path) / name).is_file() for name in _SETTINGS):
            return None
        raise _unreadable(name_or_path, error) from error
    except ImportError as error:
        raise ThreestepError(
            f"'{name_or_path}' supports images, which requires Pillow; install it: pip install pillow "
            f"({first_line(error)})"
        ) from error
    except Exception as error:  # each value of the file has an error of its own
        raise _unreadable(name_or_path, error) from error
    if not type(processor).__name__.endswith("Pil"):
        raise ThreestepError(
            f"'{name_or_path}': expected an image processor that transformers implements with Pillow, got "
            f"{type(processor).__name__}; torchvision's pixels differ from Pillow's"
        )
    return ImageReader(family_of(config, tokenizer), processor, config.model_type)


def _unreadable(name_or_path: str, error: Exception) -> ThreestepError:
    return ThreestepError(
        f"'{name_or_path}': the installed transformers cannot read preprocessor_config.json ({type(error).__name__}: "
        f"{first_line(error)}); copy it from the base model"
    )


def unread_because(config: Any, name_or_path: str) -> str:
    """Return the reason why a model without a reader does not read images: ends "the row holds images, and ...".

    config: of a model of images and text.
    """
    if knows(config):
        return (
            f"'{name_or_path}' ({config.model_type}) has no image processor settings; to train on images, copy "
            "preprocessor_config.json from its base model"
        )
    return (
        f"models of the family {config.model_type} cannot be trained on images here, only those of "
        f"{known_families()}; train a model of one of these families, or train on text alone"
    )


def _own_processor(family: ImageFamily, processor: Any, model_type: str) -> Any | None:
    """The family's processor of transformers, with what it needs to write images; None where it cannot be asked. Its
    constructor is left out: it wants torchvision for videos, which nothing here has."""
    try:
        module = importlib.import_module(f"transformers.models.{model_type}.processing_{model_type}")
        kind = getattr(module, family.processor)
    except (ImportError, AttributeError):
        return None
    if not hasattr(kind, "replace_image_token"):  # of an older transformers
        return None
    own = object.__new__(kind)
    for name, value in {"image_processor": processor, **family.attributes}.items():
        setattr(own, name, value)
    return own


class EncodedPictures(Protocol):
    """Encoded pictures by key."""

    def __getitem__(self, key: Any) -> bytes: ...


class PixelReader:
    """The pixels of a split's pictures, decoded when they are asked for."""

    def __init__(self, reader: ImageReader, pictures: EncodedPictures) -> None:
        self.reader = reader
        self.pictures = pictures

    def encoded(self, key: int) -> bytes:
        """The picture of a key, as it is stored."""
        return self.pictures[key]

    def shown(self, media: Sequence[MediaSpan]) -> Iterator[ShownImage]:
        """The images of a row, in the order of their tokens."""
        return shown_images(media, self.pictures, self.reader)

    def __call__(self, keys: Sequence[int]) -> ImagePixels:
        """The input of a vision tower for these images. keys: of `TokenRows.images`, in order; a picture that is cut up
        has as many spans as parts, one after the other. ValueError without keys."""
        read: list[ImagePixels] = []
        at = 0
        while at < len(keys):
            pixels = self.reader.pixels(self.pictures[keys[at]])
            spans = len(pixels.counts)
            if set(keys[at : at + spans]) != {keys[at]}:
                raise AssertionError(f"a picture of {spans} parts has spans of {list(keys[at : at + spans])}")
            read.append(pixels)
            at += spans
        return joined_pixels(read)
