"""Images, audio and video in rows and messages: refused by name, because only text is trained on.

A literal "<image>" is text where nothing beside it holds an image.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from training.utils.run.errors import ThreestepError

_NAMES = ("image", "images", "video", "videos", "audio", "audios")
_WORD = re.compile(r"(^|_|\.)(image|img|picture|photo|pixel|video|audio)s?(_|\.|$)", re.IGNORECASE)
_PLACEHOLDER = re.compile(r"<\|?(image|video|audio)(_pad)?\|?>")
_TEXT_PARTS = (None, "text", "input_text", "output_text")


class BadConversation(ThreestepError):
    """One row that cannot become a conversation to train on; the message names the row."""


def media_columns(columns: Iterable[str]) -> list[str]:
    """The columns that may hold images, audio or video, by their names."""
    return [column for column in columns if column in _NAMES or _WORD.search(column)]


def check_media(row: Mapping[str, Any], columns: Collection[str], where: str) -> None:
    """Raise BadConversation where one of these columns of a row holds media: a column of one of `_NAMES` that is not
    empty, and any of the others where a text of the row has a placeholder such as <image>."""
    for column in columns:
        value = row.get(column)
        if value in (None, "", "[]", [], {}):
            continue
        if column in _NAMES or _PLACEHOLDER.search(json.dumps(row, default=str)):
            raise BadConversation(
                f"{where}: column '{column}' holds {_kind(column)}, and only text is trained on; leave such rows out, "
                "or remove the column where the texts stand by themselves"
            )


def _kind(name: str) -> str:
    return "video" if "video" in name else "audio" if "audio" in name else "images"


def joined_text(message: Mapping[str, Any], where: str) -> str | None:
    """The text of a message's content: of a list of typed parts, their texts one after the other; None for none.

    Raises BadConversation for parts that are no text, and for images, audio and video beside the content.
    """
    for name in _NAMES:
        if message.get(name):
            raise BadConversation(f"{where}: '{name}': expected text, got {_kind(name)}; only text is trained on")
    content = message.get("content")
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and kind not in _TEXT_PARTS:
            raise BadConversation(
                f"{where}: a content part of type {kind!r}: expected text, and only text is trained on; leave such "
                "rows out"
            )
        text = part.get("text", "") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise BadConversation(
                f"{where}: expected content that is text or a list of parts such as "
                f'{{"type": "text", "text": ...}}, got {content!r:.60}'
            )
        texts.append(text)
    return "".join(texts)
