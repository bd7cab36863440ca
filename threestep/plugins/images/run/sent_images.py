"""Images that clients of the training server send among the tokens of a sequence, as the Tinker API has them.

Each is read when its request comes: its kind, its format, its size before anything is decoded, and the number of tokens
that the sender counted. One is decoded at a time, however many requests there are.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.images.data.decoding import encoded, picture_size
from threestep.plugins.images.data.row_pictures import RowPicture, RowPictures
from threestep.plugins.images.data.values import image_bytes
from threestep.plugins.images.models.pictured import RowImages
from threestep.plugins.images.run.chat_images import PLAIN_PICTURES, QUESTION, plain_picture
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import TokenSequence, plain
from training.utils.contracts.media import SentMedium
from training.utils.data.rows.media_store import HeldMedia

if TYPE_CHECKING:
    from threestep.plugins.images.data.reader import ImageReader
    from training.utils.contracts.documents import Document

_IMAGE, _POINTER = "image", "image_asset_pointer"  # kinds of chunks
_FORMATS = {"png": "PNG", "jpeg": "JPEG"}  # of the API, by Pillow's names
_FIELDS = ("data", "format", "expected_tokens")


class SentImages:
    """See `SentMedia`."""

    def __init__(self, reader: ImageReader, tokenizer: Any) -> None:
        self._reader, self._tokenizer = reader, tokenizer
        # One thread for all requests: it uses again what it freed, and memory does not grow with their number.
        self._decoding = ThreadPoolExecutor(1, "decoding")
        self.placeholder_id = reader.family.placeholder_id
        self.most = 1 if reader.family.one_picture else None
        pictures = [encoded(plain_picture(place), "an example") for place in range(PLAIN_PICTURES)]
        examples = tuple(self._example(data, place) for place, data in enumerate(pictures))
        self.run = RowImages(reader.of_stored(pictures), examples)

    def of(self, sent: Sequence[bytes]) -> RowImages:
        """See `SentMedia`."""
        return replace(self.run, pixels_of=self._reader.of_stored(sent))

    def read(self, kind: str, given: Mapping[str, Any], where: str) -> SentMedium:
        """See `SentMedia`. given: fields of the chunk, the picture as bytes or in base64."""
        if kind == _POINTER:
            raise ThreestepError(
                f"{where}: an {_POINTER} is not supported, because the server fetches no URLs and reads no local "
                "files for clients; send the image itself as an ImageChunk"
            )
        if kind != _IMAGE:
            raise ThreestepError(f"{where}: expected encoded_text or image, got {kind:.60}")
        for name in given:
            if name not in _FIELDS:
                raise ThreestepError(f"{where}: '{name:.60}' is not supported for images; remove it")
        data, expected = _bytes_of(given.get("data"), where), given.get("expected_tokens")
        if expected is not None and type(expected) is not int:
            raise ThreestepError(f"{where}: expected_tokens must be a whole number, got {expected!r:.60}")
        size = picture_size(data, where)
        if _FORMATS.get(str(given.get("format"))) != size.format:
            raise ThreestepError(
                f"{where}: format must be {' or '.join(_FORMATS)}, matching the image, got "
                f"{given.get('format')!r:.60} for a {size.format} image; set the image's own format"
            )
        medium = self._decoding.submit(self._read, data, where).result()
        if expected not in (None, len(medium.ids)):
            raise ThreestepError(
                f"{where}: expected_tokens must be {len(medium.ids)}, the number of tokens that the model uses for an "
                f"image of {size.width} x {size.height} pixels, got {expected}; count with the image processor in the "
                "model's own folder"
            )
        return medium

    def _read(self, data: bytes, where: str) -> SentMedium:
        try:
            text = self._reader.text_of(data, where)
        except MemoryError as problem:
            raise ThreestepError(
                f"{where}: there is not enough memory to decode the image; send a smaller one"
            ) from problem
        ids = self._tokenizer(text.text, add_special_tokens=False)["input_ids"]
        spans = RowPictures(self._reader, HeldMedia()).spans(ids, [RowPicture(0, text, "")], where)
        return SentMedium(tuple(ids), spans, data)

    def _example(self, data: bytes, place: int) -> Document:
        """A picture, and a text behind it that is to be predicted."""
        medium = self._read(data, "an example")
        text = self._tokenizer(QUESTION, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([*text[:1], *medium.ids, *text])
        is_target = torch.arange(len(ids)) > len(medium.ids)
        media = tuple(replace(span, begin=span.begin + 1, key=place) for span in medium.media)
        return plain(TokenSequence(ids, is_target, media))


def _bytes_of(given: Any, where: str) -> bytes:
    if isinstance(given, str):
        try:
            given = base64.b64decode(given, validate=True)
        except (binascii.Error, ValueError) as problem:
            raise ThreestepError(f"{where}: data expects a base64-encoded image, got other text") from problem
    if not isinstance(given, bytes):
        raise ThreestepError(f"{where}: data expects the bytes of an image, got {type(given).__name__}")
    return image_bytes(given, None, where)
