"""Images of rows for people to see: what each is in words, and small pictures for a page."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from threestep.plugins.images.data.decoding import decoded, picture_size

if TYPE_CHECKING:
    from training.utils.contracts.documents import MediaSpan

_LONGEST_SIDE = 256  # pixels, of a picture on a page
_WHERE = "an image of the cache"


@dataclass(frozen=True)
class ShownImage:
    """words: its size, and where its tokens stand. data: the encoded picture."""

    words: str
    data: bytes
    kind = "image"

    @property
    def name(self) -> str:
        """The sha256 of the encoded picture in hex: the same wherever it is shown."""
        return hashlib.sha256(self.data).hexdigest()

    def small(self, longest_side: int) -> bytes:
        """A copy as PNG, neither side of which has more pixels than that."""
        small = decoded(self.data, _WHERE)
        small.thumbnail((longest_side, longest_side))
        file = io.BytesIO()
        small.save(file, format="PNG")
        return file.getvalue()

    def uri(self) -> str:
        """A small copy as the address of a picture on a page, which holds it."""
        return "data:image/png;base64," + base64.b64encode(self.small(_LONGEST_SIDE)).decode()


def shown_images(spans: Sequence[MediaSpan], pictures: Any, reader: Any) -> Iterator[ShownImage]:
    """The images of a row, in the order of their tokens. pictures: encoded, by key. reader: an ImageReader."""
    at = 0
    while at < len(spans):
        data = pictures[spans[at].key]
        parts = spans[at : at + len(reader.text_of(data, _WHERE).runs)]
        at += len(parts)
        size = picture_size(data, _WHERE)
        tokens = sum(span.tokens for span in parts)
        sides = "" if parts[0].sides is None else " of {} x {}".format(*parts[0].sides)
        tiles = "" if len(parts) == 1 else f" in {len(parts)} tiles"
        yield ShownImage(
            f"{size.width} x {size.height} pixels ({size.format}, {len(data):,} bytes), {tokens:,} "
            f"token{'s' * (tokens > 1)}{sides}{tiles}"
            f" from token {parts[0].begin:,}",
            data,
        )


def counting_placeholders(decode: Callable[[Sequence[int]], str], placeholder: str) -> Callable[[Sequence[int]], str]:
    """`decode` with the placeholders of an image written once, with their number."""
    run = re.compile(f"(?:{re.escape(placeholder)})+")

    def short(found: re.Match[str]) -> str:
        count = len(found[0]) // len(placeholder)
        return found[0] if count == 1 else f"{placeholder} x {count}"

    return lambda ids: run.sub(short, decode(ids))
