"""The system prompt that a chat template writes by itself, where a conversation has none."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_ASKED, _ANSWERED = "\U000f0001", "\U000f0002"  # private characters, which no template writes
_SAFE = 4  # ids, the last of which may be another where the text goes on


def template_prompt(render: Callable[[list[dict[str, str]]], str], tokenizer: Any) -> str:
    """Return the ids, with blanks between, that a template writes before a conversation without a system message, and
    not before a later message of the user's; "" if these are special tokens alone. render: messages to text."""
    asked = {"role": "user", "content": _ASKED}
    parts = render([asked, {"role": "assistant", "content": _ANSWERED}, asked]).split(_ASKED)
    if len(parts) != 3:
        return ""
    before, between, _ = parts
    shared = len(os.path.commonprefix([before[::-1], between[::-1]]))
    added = tokenizer(before[: len(before) - shared], add_special_tokens=False)["input_ids"]
    if all(number in tokenizer.all_special_ids for number in added):
        return ""
    return " ".join(map(str, added[: max(len(added) - 1, _SAFE)]))
