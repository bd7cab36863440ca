"""Places of images in a conversation: tags in a text, or typed parts, become parts that a chat template reads.

| form | a place |
| --- | --- |
| verl, LLaMA-Factory | `<image>` in the text |
| TRL, OpenAI's typed parts | a part {"type": "image"}, without or with its own image in it |
| TRL's plain text | none: all images come before the first user's text |

Knows nothing of bytes, tokens or templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.utils.data.files.columns import kind_of
from training.utils.data.formats.media import BadConversation, is_image_part

if TYPE_CHECKING:
    from training.utils.data.formats.messages import Message

TAG = "<image>"
_TEXT_TYPES = (None, "text", "input_text", "output_text")
_HELD_IN = ("image", "image_url", "url", "path", "base64", "bytes", "source")  # keys of a part with its image


@dataclass(frozen=True)
class PlacedImages:
    """Messages whose content is a text, or a list of {"type": "text", "text": ...} and {"type": "image"}, and the
    images in the order of the places."""

    messages: list[Message]
    images: list[Any]


def place_images(messages: Sequence[Message], images: Sequence[Any], where: str) -> PlacedImages:
    """Give each image its place.

    messages: with role and content, a text or typed parts.
    images: of the row's column, in the order of the places.
    A row without images and without parts that hold some stays as it is: `<image>` is a text there.
    Raises BadConversation, which begins with `where`, where places and images differ in number, for an image that the
    model would have to write, and for video, audio and other parts.
    """
    typed = any(is_image_part(part) for message in messages for part in _parts(message))
    split_tags = bool(images) and not typed
    read = [_read(message, split_tags, f"{where}, message {at}") for at, message in enumerate(messages, start=1)]
    held = [part["image"] for message in read for part in _parts(message) if is_image_part(part)]
    own = [image for image in held if image is not None]
    if own and (images or len(own) < len(held)):
        raise BadConversation(
            f"{where}: expected images either in a column or in the parts of messages, got {len(own)} in parts, "
            f"{len(held) - len(own)} parts without one and {len(images)} in a column"
        )
    if images and not held:
        read = _before_first_user(read, len(images), where)
    elif len(held) != len(own or images):
        raise BadConversation(
            f"{where}: expected an image for each place, got {len(images)} images and {len(held)} places"
        )
    return PlacedImages([_without_images(message) for message in read], own or list(images))


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _read(message: Message, split_tags: bool, where: str) -> Message:
    """The message with its image parts as {"type": "image", "image": the one it holds, or None}."""
    content = message.get("content")
    if isinstance(content, list):
        read = [inner for part in content for inner in _read_part(part, split_tags, where)]
    elif isinstance(content, str) and split_tags and TAG in content:
        read = _split(content)
    elif content is None or isinstance(content, str):
        return message
    else:
        raise BadConversation(f"{where}: 'content': expected text or typed parts, got {kind_of(content)}")
    if message.get("role") == "assistant" and any(map(is_image_part, read)):
        raise BadConversation(
            f"{where}: an image in an assistant message: a model learns to write text only; move it to an earlier "
            "message, or remove the row"
        )
    return {**message, "content": read}


def _read_part(part: Any, split_tags: bool, where: str) -> list[dict[str, Any]]:
    if is_image_part(part):
        return [{"type": "image", "image": _held(part, where)}]
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in _TEXT_TYPES:
        got = f"one of type {kind!r}" if isinstance(part, Mapping) else kind_of(part)
        raise BadConversation(f"{where}: a content part: expected text or an image, got {got}")
    if not isinstance(text, str):
        raise BadConversation(f"{where}: a content part: expected text, got {kind_of(text)}")
    return _split(text) if split_tags else [{"type": "text", "text": text}]


def _held(part: Mapping[str, Any], where: str) -> Any:
    """The image that a part holds; None: it only marks a place."""
    held = {key: part[key] for key in _HELD_IN if part.get(key) is not None}
    if len(held) > 1:
        raise BadConversation(f"{where}: an image part: expected one image, got {len(held)}")
    if "file_id" in part and not held:
        raise BadConversation(f"{where}: an image part: expected its image, got a file_id from an online service")
    if "base64" in held:
        return held
    inner = next(iter(held.values()), None)
    return inner["url"] if isinstance(inner, Mapping) and "url" in inner else inner  # OpenAI's image_url


def _split(text: str) -> list[dict[str, Any]]:
    """The text cut at its tags; texts of nothing are left out."""
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(TAG)):
        if number:
            parts.append({"type": "image", "image": None})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _before_first_user(messages: list[Message], count: int, where: str) -> list[Message]:
    at = next((at for at, message in enumerate(messages) if message.get("role") == "user"), None)
    if at is None:
        raise BadConversation(f"{where}: expected a user message for {count} images without a place, got none")
    content = messages[at].get("content")
    texts = content if isinstance(content, list) else _split(content or "")
    places = [{"type": "image", "image": None} for _ in range(count)]
    return [*messages[:at], {**messages[at], "content": [*places, *texts]}, *messages[at + 1 :]]


def _without_images(message: Message) -> Message:
    """The message with image parts that only mark their place; a list of one text as the text."""
    parts = [{"type": "image"} if is_image_part(part) else part for part in _parts(message)]
    if not parts:
        return message if not isinstance(message.get("content"), list) else {**message, "content": ""}
    if any(map(is_image_part, parts)):
        return {**message, "content": parts}
    return {**message, "content": "".join(part["text"] for part in parts)}
