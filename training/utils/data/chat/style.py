"""The prompt style that a run uses, and why: the flags', the one saved with the model, or the tokenizer's; and the chat
template of a tokenizer that has several by name.

A trained model's style is saved in its tokenizer_config.json, under a name of ours that transformers keeps and ignores,
so it goes wherever the tokenizer goes: the model folder, checkpoints, exports, the hub. Knows nothing of token ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.data.rows.arguments import CHAT_TEMPLATE, HUMAN_ASSISTANT, PROMPT_STYLES, ChatArguments
from training.utils.flags.flags import AUTO

KEY = "threestep"  # in tokenizer_config.json


@dataclass(frozen=True)
class SavedStyle:
    """The form of prompts that a model was trained on.

    prompt_style: one of PROMPT_STYLES.
    end_of_conversation_token: the flag's; None: the chat template's end of a turn, or the tokenizer's eos.
    template_kwargs: variables of the chat template for every row.
    prompt_end: white space with which every prompt as stored ends.
    """

    prompt_style: str
    end_of_conversation_token: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    prompt_end: str = field(default="", compare=False)

    def __str__(self) -> str:
        end = "" if self.end_of_conversation_token is None else f", end token {self.end_of_conversation_token}"
        return self.prompt_style + end + in_words(self.template_kwargs)

    @classmethod
    def of(cls, chat: ChatArguments) -> SavedStyle:
        """The record that is saved with the model, from resolved flags (see `resolved_chat`)."""
        assert chat.prompt_style != AUTO, "resolved flags name a style"
        return cls(chat.prompt_style, chat.end_of_conversation_token, chat.template_kwargs)


def in_words(template_kwargs: dict[str, Any]) -> str:
    """A chat template's variables, each after a comma."""
    return "".join(f", {name} {json.dumps(value)}" for name, value in template_kwargs.items())


def save_style(tokenizer: Any, style: SavedStyle) -> None:
    """Note the style in `tokenizer`, which writes it wherever it is saved."""
    tokenizer.init_kwargs[KEY] = {
        "prompt_style": style.prompt_style,
        "end_of_conversation_token": style.end_of_conversation_token,
        "chat_template_kwargs": style.template_kwargs,
        **({"prompt_end": style.prompt_end} if style.prompt_end else {}),
    }


def saved_style(tokenizer: Any) -> SavedStyle | None:
    """The style that the tokenizer's model was trained with; None where none is saved. ThreestepError where it is not
    one of ours."""
    saved = getattr(tokenizer, "init_kwargs", {}).get(KEY)
    if saved is None:
        return None
    where = f"tokenizer_config.json of '{tokenizer.name_or_path}': {KEY}"
    if not isinstance(saved, dict):
        raise ThreestepError(f"{where}: expected an object with prompt_style, got {saved!r:.60}; remove it")
    name, end, kwargs, prompt_end = (
        saved.get(key) for key in ("prompt_style", "end_of_conversation_token", "chat_template_kwargs", "prompt_end")
    )
    if name not in PROMPT_STYLES:
        raise ThreestepError(
            f"{where}.prompt_style: expected one of {', '.join(PROMPT_STYLES)}, got {name!r}"
            f"{nearest_names(str(name), PROMPT_STYLES)}; correct it, or give --prompt_style"
        )
    if not isinstance(end, str | None) or not isinstance(kwargs, dict | None):
        raise ThreestepError(
            f"{where}: expected end_of_conversation_token to be text and chat_template_kwargs an object, got {end!r} "
            f"and {kwargs!r:.60}; correct them, or remove '{KEY}' and give --prompt_style"
        )
    return SavedStyle(name, end, kwargs or {}, prompt_end if isinstance(prompt_end, str) else "")


def resolved_chat(chat: ChatArguments, tokenizer: Any) -> ChatArguments:
    """The flags with a style and, where they leave them open, the settings that the model was trained with.

    Resolved flags are unchanged, and so are those of a run whose style has been saved in `tokenizer`. ThreestepError
    where the saved style cannot be read, or flags of a chat template come without one.
    """
    saved = saved_beside(chat, tokenizer)
    style = _chosen(chat, saved, tokenizer)[0]
    chat = replace(chat, prompt_style=style)
    if not _is_same(chat, saved, tokenizer):
        return chat
    assert saved is not None
    kwargs = {**saved.template_kwargs, **chat.template_kwargs}
    return replace(
        chat,
        end_of_conversation_token=chat.end_of_conversation_token or saved.end_of_conversation_token,
        chat_template_kwargs=json.dumps(kwargs) if kwargs else None,
    )


def reason_of_style(chat: ChatArguments, tokenizer: Any, end_of: Callable[[ChatArguments], str]) -> str:
    """The reason for the style that these flags give with this tokenizer; and which of them differ from the style that
    is saved with the model. end_of: the end token that flags give."""
    saved = saved_beside(chat, tokenizer)
    style, reason = _chosen(chat, saved, tokenizer)
    differ = []
    if saved is not None and saved.prompt_style != style:
        differ.append(saved.prompt_style)
    elif saved is not None and _is_same(replace(chat, prompt_style=style), saved, tokenizer):
        was = end_of(replace(chat, prompt_style=style, end_of_conversation_token=saved.end_of_conversation_token))
        if end_of(chat) != was:
            differ.append(f"the end token {was}")
        given = chat.template_kwargs
        differ += [
            f"{name} {json.dumps(value)}"
            for name, value in saved.template_kwargs.items()
            if given.get(name, value) != value
        ]
    elif saved is not None:
        differ.append("another chat template")
    return f"{reason}; '{tokenizer.name_or_path}' was trained with {' and '.join(differ)}" if differ else reason


def saved_beside(chat: ChatArguments, tokenizer: Any) -> SavedStyle | None:
    """The saved style; None too where a flag names the style and the saved one cannot be read."""
    try:
        return saved_style(tokenizer)
    except ThreestepError:
        if chat.prompt_style == AUTO:
            raise
        return None


def _chosen(chat: ChatArguments, saved: SavedStyle | None, tokenizer: Any) -> tuple[str, str]:
    """The style and the reason for it."""
    if chat.prompt_style != AUTO:
        return chat.prompt_style, "--prompt_style"
    if chat.chat_template is not None:
        return CHAT_TEMPLATE, "--chat_template"
    if saved is not None and (saved.prompt_style == CHAT_TEMPLATE or not chat.template_flags):
        return saved.prompt_style, f"saved with '{tokenizer.name_or_path}'"
    if getattr(tokenizer, "chat_template", None):
        return CHAT_TEMPLATE, "the tokenizer has a template"
    if chat.template_flags:
        raise ThreestepError(
            f"{' and '.join(chat.template_flags)} expects a chat template, got a tokenizer without one "
            f"('{tokenizer.name_or_path}'); give one with --chat_template FILE, or leave the flag out"
        )
    return HUMAN_ASSISTANT, "the tokenizer has no chat template"


def _is_same(chat: ChatArguments, saved: SavedStyle | None, tokenizer: Any) -> bool:
    """True if resolved flags and the model agree on the style and, if one is used, on the template."""
    if saved is None or saved.prompt_style != chat.prompt_style:
        return False
    return chat.chat_template is None or Path(chat.chat_template).read_text("utf-8") == tokenizer.chat_template


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
