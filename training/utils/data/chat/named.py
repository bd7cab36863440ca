"""The chat template of a tokenizer that has several by name."""

from __future__ import annotations

from typing import Any

from training.utils.base.errors import ThreestepError

_DEFAULT, _FOR_TOOLS = "default", "tool_use"  # transformers' names


def template_text(tokenizer: Any, tools: Any, whose: str) -> str:
    """The template for a conversation: the one for tools where there are some, otherwise the default, or the only one.

    whose: the tokenizer, for the error. Raises ThreestepError where several have other names.
    """
    templates = tokenizer.chat_template
    if not isinstance(templates, dict):
        return templates
    if tools and _FOR_TOOLS in templates:
        return templates[_FOR_TOOLS]
    if _DEFAULT in templates:
        return templates[_DEFAULT]
    others = [name for name in templates if name != _FOR_TOOLS] or list(templates)
    if len(others) == 1:
        return templates[others[0]]
    raise ThreestepError(
        f"{whose} has the chat templates {', '.join(map(repr, templates))} and none named '{_DEFAULT}'; give one as "
        "--chat_template FILE"
    )
