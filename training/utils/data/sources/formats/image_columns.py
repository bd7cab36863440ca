"""The images that stand in a column of a row, beside its texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.utils.data.sources.formats.media import IMAGE_COLUMNS, BadConversation, is_empty
from training.utils.data.sources.formats.messages import from_json


def image_values(row: Mapping[str, Any], where: str) -> list[Any]:
    """The values in a row's column `images` (TRL, verl, LLaMA-Factory) or `image` (TRL): a list, its JSON text, or one
    image; none of an empty one.

    Raises BadConversation where both columns hold something.
    """
    held = [column for column in IMAGE_COLUMNS if not is_empty(row.get(column))]
    if len(held) > 1:
        raise BadConversation(f"{where}: expected images in one column, got both 'images' and 'image'; remove one")
    if not held:
        return []
    value = row[held[0]]
    if isinstance(value, str) and value.startswith("["):  # of CSV
        value = from_json(value, f"{where}, column '{held[0]}'", "a list of images")
    return list(value) if isinstance(value, (list, tuple)) else [value]
