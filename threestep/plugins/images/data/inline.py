"""Pictures inside of a text: data URLs (RFC 2397), and base64 alone."""

from __future__ import annotations

import base64
import binascii
from urllib.parse import unquote_to_bytes

from training.utils.data.formats.media import BadConversation

_SCHEME = "data:"
_KINDS = ("", "image", "application/octet-stream", "binary/octet-stream")  # of unknown files too
_SHOWN = 40  # characters, in an error


def is_data_url(text: str) -> bool:
    """True for a text that begins as a data URL, in either case."""
    return text.lstrip()[: len(_SCHEME)].lower() == _SCHEME


def data_url_bytes(url: str, most_bytes: int, where: str) -> bytes:
    """The bytes that a data URL holds, in base64 or percent-encoded.

    Raises BadConversation, which begins with `where`, for one that is no picture's, too large, or cannot be decoded.
    """
    head, comma, body = url.strip().partition(",")
    kind, *parameters = (word.strip().lower() for word in head[len(_SCHEME) :].split(";"))
    if not comma:
        raise BadConversation(f"{where}: expected data:image/...;base64,..., got {url[:_SHOWN]!r} without a comma")
    if kind not in _KINDS and kind.partition("/")[0] not in _KINDS:
        raise BadConversation(f"{where}: expected an image, got a data URL of the type {kind[:_SHOWN]!r}")
    if "base64" in parameters:
        return base64_bytes(unquote_to_bytes(body) if "%" in body else body, most_bytes, where)
    _check_length(body, 3 * most_bytes, where)
    return unquote_to_bytes(body)


def base64_bytes(text: str | bytes, most_bytes: int, where: str) -> bytes:
    """The bytes of a text in base64, of either alphabet, with line breaks or without its padding. BadConversation as
    above."""
    _check_length(text, 2 * most_bytes, where)
    try:
        signs = b"".join((text.encode("ascii") if isinstance(text, str) else text).split()).rstrip(b"=")
        return base64.b64decode(signs.translate(_STANDARD) + b"=" * (-len(signs) % 4), validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise BadConversation(f"{where}: expected a base64-encoded image, but it cannot be decoded: {error}") from error


_STANDARD = bytes.maketrans(b"-_", b"+/")


def _check_length(text: str | bytes, most: int, where: str) -> None:
    if len(text) > most:
        raise BadConversation(f"{where}: expected an image of at most {most:,} characters, got {len(text):,}")
