"""The images of a row: read, put in their places, and located among its tokens.

A chat template writes one token for an image. Before the texts are tokenized, it is replaced by all that the model
reads for the picture, once; then lengths, cuts and filters count what is trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from threestep.plugins.images.data.placeholders import place_images
from threestep.plugins.images.data.values import image_bytes
from training.utils.contracts.documents import MediaSpan
from training.utils.data.formats.media import BadConversation
from training.utils.data.formats.messages import REASONING_KEYS, Message
from training.utils.data.rows.tokenize import Dropped, Ids

if TYPE_CHECKING:
    from threestep.plugins.images.data.families import ImageText
    from training.utils.data.chat.chat import TextPiece
    from training.utils.data.rows.media_store import GrowingStore

WHY_DROPPED = {"cut_at_an_image": "it would be cut inside an image, or before one"}


@dataclass(frozen=True)
class RowPicture:
    """A stored picture, by its key, and the text that stands for it among the tokens. digest: its sha256 in hex."""

    key: int
    text: ImageText
    digest: str


@dataclass(frozen=True)
class RowPictures:
    """Reads the images of rows for one model, and stores their pictures. reader: an ImageReader. allow_urls: see
    `image_bytes`."""

    reader: Any
    pictures: GrowingStore
    allow_urls: bool = False

    @property
    def seen(self) -> Any:
        """The pixels of the pictures that were read so far."""
        return self.reader.of_stored(self.pictures)

    def placed(
        self, messages: Sequence[Message], values: Sequence[Any], folder: str | None, where: str
    ) -> tuple[list[Message], tuple[RowPicture, ...]]:
        """The messages with parts that mark the places of images, and the images in the order of the places.

        values: of the row, in the same order. folder: that paths are relative to.
        Raises BadConversation for images that do not fit their places or cannot be read, and for a text that holds a
        token by which the model knows images.
        """
        parts = place_images(messages, values, where)
        self._check_texts(parts.messages, where)
        if self.reader.family.one_picture and len(parts.images) > 1:
            raise BadConversation(
                f"{where}: expected at most one image, got {len(parts.images)}: {self.reader.model_type} handles rows "
                "with several images in a way that cannot be trained here; remove such rows, or use another model "
                "family"
            )
        root = None if folder is None else Path(folder)
        images = []
        for number, value in enumerate(parts.images, start=1):
            named = f"{where}, image {number}"
            data = image_bytes(value, root, named, self.allow_urls)
            text = self.reader.text_of(data, named)
            digest = hashlib.sha256(data)
            images.append(RowPicture(self.pictures.add(digest.digest(), data), text, digest.hexdigest()))
        return parts.messages, tuple(images)

    def _check_texts(self, messages: Sequence[Message], where: str) -> None:
        family = self.reader.family
        for number, message in enumerate(messages, start=1):
            content = message.get("content")
            texts = [part.get("text") for part in content] if isinstance(content, list) else [content]
            texts += [message.get(key) for key in REASONING_KEYS]
            for token in {family.written, family.placeholder}:
                if any(isinstance(text, str) and token in text for text in texts):
                    raise BadConversation(
                        f"{where}, message {number}: the text contains {token}, the token that stands for images in "
                        "this model; put the image in the message as a part, or as <image> in its text with a column "
                        "'images'"
                    )

    def expanded(self, pieces: Sequence[TextPiece], images: Sequence[RowPicture], where: str) -> list[TextPiece]:
        """The pieces of a rendered conversation with all that the model reads for each image.

        Raises BadConversation where the template did not write as many images as there are.
        """
        written = self.reader.family.written
        count = sum(piece.text.count(written) for piece in pieces)
        if count != len(images):
            raise BadConversation(
                f"{where}: expected the chat template to render {written} for each of {len(images)} images, got "
                f"{count}; it must render parts of the type 'image'"
            )
        waiting = iter(images)
        expanded = []
        for piece in pieces:
            first, *others = piece.text.split(written)
            text = first + "".join(next(waiting).text.text + other for other in others)
            expanded.append(replace(piece, text=text) if others else piece)
        return expanded

    def spans(self, ids: Ids, images: Sequence[RowPicture], where: str) -> tuple[MediaSpan, ...]:
        """Spans of the images among the tokens of a row.

        Raises BadConversation where other tokens than theirs are the placeholder, or the tokenizer broke them up.
        """
        family = self.reader.family
        places = np.flatnonzero(np.array(ids, np.int64) == family.placeholder_id)
        expected = sum(image.text.tokens for image in images)
        if len(places) != expected:
            raise BadConversation(
                f"{where}: expected {expected} tokens {family.placeholder} for {len(images)} images, got "
                f"{len(places)}; texts must not contain that token, and the tokenizer must not change it"
            )
        spans = []
        at = 0
        for key, run in [(image.key, run) for image in images for run in image.text.runs]:
            begin, last = int(places[at]), int(places[at + run.tokens - 1])
            if last - begin + 1 != run.tokens:
                raise BadConversation(f"{where}: the tokenizer inserts other tokens among those of an image")
            spans.append(MediaSpan(begin, run.tokens, run.sides, key, family.sees_itself))
            at += run.tokens
        return tuple(spans)

    def after_cut(self, spans: Sequence[MediaSpan], kept: Sequence[int]) -> tuple[MediaSpan, ...]:
        """See `ReadsMedia`. An image of which a part is cut off drops its row, since the response may speak of it."""
        if not spans:
            return ()
        places = np.array(kept, np.int64)
        moved = []
        for span in spans:
            begin, end = (int(place) for place in np.searchsorted(places, [span.begin, span.end]))
            if end - begin != span.tokens:
                raise Dropped("cut_at_an_image")
            moved.append(replace(span, begin=begin))
        return tuple(moved)
