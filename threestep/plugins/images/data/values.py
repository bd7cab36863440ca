"""Images as rows hold them: bytes, a data URL, a path inside the data's folder, Hugging Face's struct, a PIL image.

All become the bytes of an encoded picture, and nothing is decoded but a PIL image. No address is fetched unless a user
allows it, and no path leaves the folder.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from threestep.plugins.images.data.fetching import fetched
from threestep.plugins.images.data.inline import base64_bytes, data_url_bytes, is_data_url
from training.utils.contracts.rows import MOST_FILE_BYTES
from training.utils.data.files.columns import kind_of
from training.utils.data.formats.media import BadConversation

BASE64 = "base64"
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://", re.ASCII)
_FORMS = "bytes, a data URL, a path inside the data's folder, an object with 'bytes' or 'path', or a PIL image"
# Of Hugging Face's struct and of verl's object, of OpenAI's parts, and of Anthropic's source.
_KEYS = ("bytes", "path", "image", "image_url", "url", BASE64, "source")
_DEEPEST = 3  # {"image_url": {"url": ...}} in a column


def image_bytes(value: Any, folder: Path | None, where: str, allow_urls: bool = False) -> bytes:
    """The encoded picture that a value names.

    folder: what paths are relative to; None where the rows come from no folder, and paths are refused.
    where: of the row and the image, for errors.
    allow_urls: read what public https addresses hold (`fetching`).
    Raises BadConversation for any other value, an address, and a path that leaves the folder or is no regular file.
    """
    value = _inside(value, where)
    if isinstance(value, Mapping):
        return _bounded(base64_bytes(_text_of(value[BASE64], where), MOST_FILE_BYTES, where), where)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _bounded(bytes(value), where)
    if isinstance(value, (str, os.PathLike)):
        path = os.fspath(value)
        if isinstance(path, str) and is_data_url(path):
            return _bounded(data_url_bytes(path, MOST_FILE_BYTES, where), where)
        if allow_urls and isinstance(path, str) and _ADDRESS.match(path):
            return _bounded(fetched(path, MOST_FILE_BYTES, where), where)
        return _read(path, folder, where)
    if hasattr(value, "convert") and hasattr(value, "size"):
        from threestep.plugins.images.data.decoding import encoded

        return _bounded(encoded(value, where), where)
    raise BadConversation(f"{where}: expected {_FORMS}, got {kind_of(value)}")


def _inside(value: Any, where: str) -> Any:
    """An object's value under the first of `_KEYS` that is not null, however deep; {BASE64: text} for one in base64;
    any other value as it is."""
    for _ in range(_DEEPEST):
        if not isinstance(value, Mapping):
            return value
        if value.get("type") == BASE64 and value.get("data") is not None:  # Anthropic's source
            return {BASE64: value["data"]}
        key = next((key for key in _KEYS if value.get(key) is not None), None)
        if key is None:
            break
        if key == BASE64:
            return {BASE64: value[key]}
        value = value[key]
    if not isinstance(value, Mapping):
        return value
    keys = ", ".join(f"'{key}'" for key in value) or "an empty object"
    raise BadConversation(f"{where}: expected an object with 'bytes' or 'path', got {keys:.80}")


def _text_of(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadConversation(f"{where}: expected a base64-encoded image as a string, got {kind_of(value)}")
    return value.partition(",")[2] if is_data_url(value) else value


def _read(path: str | bytes, folder: Path | None, where: str) -> bytes:
    if not isinstance(path, str) or "\0" in path or not path:
        raise BadConversation(f"{where}: expected a path, got {path!r:.60}")
    if _ADDRESS.match(path):
        raise BadConversation(
            f"{where}: expected a path inside the data's folder, got the URL {path[:60]!r}; URLs are fetched only "
            "with --allow_image_urls: add it, or store the images next to the data"
        )
    if folder is None:
        raise BadConversation(
            f"{where}: expected the bytes of an image, got the path {path[:60]!r}, but these rows have no folder"
        )
    if Path(path).is_absolute() or ".." in Path(path).parts:
        raise BadConversation(
            f"{where}: expected a path inside the data's folder, got {path[:60]!r}; absolute paths and '..' are refused"
        )
    try:
        found = (folder / path).resolve(strict=True)
        if not found.is_relative_to(folder.resolve(strict=True)):
            raise BadConversation(
                f"{where}: the path {path[:60]!r} is a link to a place outside the data's folder '{folder}'"
            )
        status = found.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would never end
            raise BadConversation(f"{where}: expected a file, but '{path[:60]}' is not a file")
        _check_bytes(status.st_size, where)
        return _bounded(found.read_bytes(), where)
    except (OSError, RuntimeError, ValueError) as error:  # a circle of links, a name that no file system takes
        reason = getattr(error, "strerror", None) or error
        raise BadConversation(f"{where}: {path[:60]!r} in '{folder}' cannot be read: {reason}") from error


def _bounded(data: bytes, where: str) -> bytes:
    if not data:
        raise BadConversation(f"{where}: expected an image, got no bytes")
    _check_bytes(len(data), where)
    return data


def _check_bytes(count: int, where: str) -> None:
    if count > MOST_FILE_BYTES:
        raise BadConversation(
            f"{where}: expected an image of at most {MOST_FILE_BYTES:,} bytes, got {count:,}; make it smaller"
        )
