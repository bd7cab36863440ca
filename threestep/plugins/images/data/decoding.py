"""Encoded pictures as pixels: formats are a list, sizes are checked before anything is decoded, Exif's rotation is
applied, and every picture becomes RGB.

Pillow decodes; nothing here knows rows, models or processors.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.utils.data.formats.media import BadConversation

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MOST_PIXELS = 50_000_000  # 150 MB as RGB
_ROTATED = (5, 6, 7, 8)  # Exif orientations that swap width and height
_ORIENTATION = 0x0112  # Exif's tag
_DEEP_MODES = ("I", "F")  # more than 8 bits a channel: Pillow's RGB clips them


@dataclass(frozen=True)
class PictureSize:
    """The header of an encoded picture. width, height: in pixels, after Exif's rotation."""

    format: str
    width: int
    height: int


def picture_size(data: bytes, where: str, most_pixels: int = MOST_PIXELS) -> PictureSize:
    """Read an encoded picture's header.

    Raises BadConversation, which begins with `where`, for bytes that are no picture of `FORMATS`, an animation, more
    than `most_pixels`, and more than 8 bits a channel.
    """
    with _opened(data, where, most_pixels) as image:
        width, height = image.size
        if image.getexif().get(_ORIENTATION) in _ROTATED:
            width, height = height, width
        return PictureSize(image.format or "", width, height)


def decoded(data: bytes, where: str, most_pixels: int = MOST_PIXELS) -> Image:
    """Return an encoded picture as a PIL image in RGB, turned as Exif says. Transparency is left out.

    Raises BadConversation as `picture_size` does, and for a picture that breaks off or is damaged.
    """
    with _opened(data, where, most_pixels) as image:
        return _in_rgb(image)


@dataclass(frozen=True, eq=False)
class DecodedPictures(Sequence):
    """Encoded pictures as a list of PIL images in RGB. Each is decoded when it is taken, and is the taker's own."""

    encoded: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: Any) -> Any:
        """A picture, or a list of those of a slice."""
        if isinstance(index, slice):
            return [decoded(data, "an image of the cache") for data in self.encoded[index]]
        return decoded(self.encoded[index], "an image of the cache")


def encoded(image: Image, where: str, most_pixels: int = MOST_PIXELS) -> bytes:
    """Return a PIL image as PNG in RGB, turned as Exif says. Raises BadConversation as `decoded` does."""
    with _in_a_sentence(where):
        _check(image, where, most_pixels)
        file = io.BytesIO()
        _in_rgb(image).save(file, format="PNG")
        return file.getvalue()


@contextmanager
def _opened(data: bytes, where: str, most_pixels: int) -> Iterator[Image]:
    from PIL import Image

    with _in_a_sentence(where), Image.open(io.BytesIO(data), formats=FORMATS) as image:
        _check(image, where, most_pixels)
        yield image


def _check(image: Image, where: str, most_pixels: int) -> None:
    width, height = image.size
    if width * height > most_pixels or width * height == 0:
        raise BadConversation(
            f"{where}: expected an image of 1 to {most_pixels:,} pixels, got {width:,} x {height:,}; make it smaller"
        )
    if getattr(image, "is_animated", False):
        raise BadConversation(f"{where}: expected one image, got an animation ({image.format}); store one frame")
    if image.mode.split(";")[0] in _DEEP_MODES:
        raise BadConversation(
            f"{where}: expected 8 bits per channel, got an image of mode '{image.mode}', which RGB would clip; store "
            "it with 8 bits per channel"
        )


def _in_rgb(image: Image) -> Image:
    from PIL import ImageOps

    return ImageOps.exif_transpose(image).convert("RGB")


@contextmanager
def _in_a_sentence(where: str) -> Iterator[None]:
    """Pillow's exceptions on bytes that it cannot read, of a dozen classes, as BadConversation; without its warnings,
    since what they are of (sizes, palettes, Exif) is checked or does not matter here."""
    from PIL import UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except (BadConversation, MemoryError):
            raise
        except UnidentifiedImageError as error:
            raise BadConversation(f"{where}: expected an image ({', '.join(FORMATS)}), got other bytes") from error
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            raise BadConversation(
                f"{where}: the image cannot be decoded ({type(error).__name__}: {reason:.100}); fix the file or "
                "remove the row"
            ) from error
