"""Images, audio and video in rows and messages: refused by name, but for images where the model reads them.

A literal "<image>" is text where nothing beside it holds an image.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from training.utils.base.errors import ThreestepError

IMAGE_COLUMNS = ("images", "image")
IMAGE_PARTS = ("image", "image_url", "input_image")  # the types of content parts that are images
_NAMES = (*IMAGE_COLUMNS, "video", "videos", "audio", "audios")
_ALL_NAMES = frozenset(_NAMES)
_WORD = re.compile(r"(^|_|\.)(image|img|picture|photo|pixel|video|audio)s?(_|\.|$)", re.IGNORECASE)
_PLACEHOLDER = re.compile(r"<\|?(image|video|audio)(_pad)?\|?>")
_TEXT_PARTS = (None, "text", "input_text", "output_text")
# Endings of types of content parts that are neither text nor media, most of them Anthropic's (mcp_tool_use, say): their
# meaning, and the remedy.
_OTHER_PARTS = {
    "tool_use": ("a tool call", "write it as the message's 'tool_calls'"),
    "tool_result": ("a tool result", "write it as a message with the role 'tool'"),
    "redacted_thinking": ("encrypted reasoning, which has no text", "remove it"),
    "thinking": ("reasoning", "write it as the message's 'reasoning_content'"),
    "reasoning": ("reasoning", "write it as the message's 'reasoning_content'"),
    "refusal": ("a refusal", "write it as text"),
}
ONLY_TEXT = "only text is trained on"  # why media of a row are not read, where nothing else is known


class BadConversation(ThreestepError):
    """One row that cannot become a conversation to train on; the message names the row."""


def media_columns(columns: Iterable[str]) -> list[str]:
    """The columns that may hold images, audio or video, by their names."""
    return [column for column in columns if column in _NAMES or _WORD.search(column)]


def check_media(
    row: Mapping[str, Any], columns: Collection[str], where: str, *, images: bool = False, unread: str = ONLY_TEXT
) -> None:
    """Raise BadConversation where one of these columns of a row holds media: a column of one of `_NAMES` that is not
    empty, and any of the others where a text of the row has a placeholder such as <image>.

    images: the model reads those of `IMAGE_COLUMNS`. unread: why it does not, for the sentence.
    """
    for column in columns:
        value = row.get(column)
        if (images and column in IMAGE_COLUMNS) or is_empty(value):
            continue
        if images and column not in _NAMES and _kind(column) == "images" and _PLACEHOLDER.search(_as_text(row)):
            raise BadConversation(
                f"{where}: column '{column}' may hold the images that the texts refer to, but images are read only "
                "from a column 'images' or 'image'; rename it, or remove it"
            )
        if column in _NAMES or _PLACEHOLDER.search(_as_text(row)):
            raise BadConversation(
                f"{where}: column '{column}' holds {_kind(column)}, but {_why(_kind(column), images, unread)}; leave "
                "such rows out, or remove the column if the texts make sense without it"
            )


def _why(kind: str, images: bool, unread: str) -> str:
    """Why media of a kind are not read. images, unread: see `check_media`."""
    if kind == "images":
        return unread
    return f"{kind} is not trained on" if images else ONLY_TEXT


def _part_problem(kind: str, images: bool, unread: str) -> str:
    """Return why a content part is not read, and the remedy. images, unread: see `check_media`."""
    for ending, (what, remedy) in _OTHER_PARTS.items():
        if kind.endswith(ending):
            return f"which is {what}; {remedy}, or leave such rows out"
    if kind in IMAGE_PARTS or _WORD.search(kind):
        return f"but {_why(_kind(kind), images, unread)}; leave such rows out"
    return "which is not read; write it as text, or leave such rows out"


def is_empty(value: Any) -> bool:
    """True if a column of a row holds nothing."""
    return value is None or (isinstance(value, (str, list, tuple, dict)) and value in ("", "[]", [], (), {}))


def _as_text(row: Mapping[str, Any]) -> str:
    return json.dumps(row, default=str)


def _kind(name: str) -> str:
    return "video" if "video" in name else "audio" if "audio" in name else "images"


def is_image_part(part: Any) -> bool:
    """True if a part of a message's content is an image, or the place of one."""
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def check_text_parts(messages: Iterable[Mapping[str, Any]], where: str, unread: str = ONLY_TEXT) -> None:
    """Raise BadConversation for an image among the parts of a message. unread: see `check_media`."""
    for number, message in enumerate(messages, start=1):
        if isinstance(message.get("content"), list) or not _ALL_NAMES.isdisjoint(message):
            joined_text(message, f"{where}, message {number}", unread=unread)


def joined_text(message: Mapping[str, Any], where: str, images: bool = False, unread: str = ONLY_TEXT) -> Any:
    """The text of a message's content: of a list of typed parts, their texts one after the other; None for none.

    images: a list with an image among its parts stays as it is. unread: see `check_media`.
    Raises BadConversation for parts that are no text, and for images, audio and video beside the content.
    """
    for name in _NAMES:
        if message.get(name):
            why = _why(_kind(name), images, unread)
            raise BadConversation(f"{where}: '{name}': expected text, got {_kind(name)}; {why}")
    content = message.get("content")
    if not content and message.get("refusal") and isinstance(message["refusal"], str):
        return message["refusal"]  # OpenAI's: the text of an answer that declines, beside a content that is null
    if not isinstance(content, list):
        return content
    texts = []
    holds_images = images and any(map(is_image_part, content))
    for part in content:
        if holds_images and is_image_part(part):
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and kind not in _TEXT_PARTS:
            problem = _part_problem(str(kind), images, unread)
            raise BadConversation(f"{where}: a content part has the type {kind!r}, {problem}")
        text = part.get("text", "") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise BadConversation(
                f"{where}: expected content that is text or a list of parts such as "
                f'{{"type": "text", "text": ...}}, got {content!r:.60}'
            )
        texts.append(text)
    return content if holds_images else "".join(texts)
