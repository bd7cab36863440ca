"""The system prompt that a chat template writes by itself, where a conversation has none."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from training.utils.data.chat.rendering import ChatTemplate, TemplateRefused
from training.utils.data.chat.style import resolved_chat
from training.utils.data.rows.arguments import CHAT_TEMPLATE

if TYPE_CHECKING:
    from training.utils.data.rows.arguments import ChatArguments

_ASKED, _ANSWERED = "\U000f0001", "\U000f0002"  # private characters, which no template writes
_SAFE = 4  # ids; the last may differ where more text follows


def own_prompt(chat: ChatArguments, tokenizer: Any) -> str:
    """The system prompt that the chat template writes by itself, as ids with blanks between; empty without one."""
    chat = resolved_chat(chat, tokenizer)
    if chat.prompt_style != CHAT_TEMPLATE:
        return ""
    text = tokenizer.chat_template if chat.chat_template is None else chat.given_template
    if not isinstance(text, str):  # several, by name
        return ""
    template = ChatTemplate(text, {**tokenizer.special_tokens_map, **chat.template_kwargs})
    try:
        return template_prompt(lambda messages: template.render(messages).text, tokenizer)
    except TemplateRefused:
        return ""


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
