"""The prompt style that a run uses, and why: the flags', the one saved with the model, or the tokenizer's.

A trained model's style is saved in its tokenizer_config.json, under a name of ours that transformers keeps and ignores,
so it goes wherever the tokenizer goes: the model folder, checkpoints, exports, the hub."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.data.chat.chat import ChatTokenizer
from training.utils.data.chat.rendering import ChatTemplate
from training.utils.data.files.digests import hash_text
from training.utils.data.formats.messages import FRAME
from training.utils.data.rows.arguments import CHAT_TEMPLATE, HUMAN_ASSISTANT, PROMPT_STYLES, ChatArguments
from training.utils.data.rows.tokenize import TextTokenizer, named_tokenizer
from training.utils.flags.flags import AUTO

KEY = "threestep"  # in tokenizer_config.json


@dataclass(frozen=True)
class SavedStyle:
    """The form of prompts that a model was trained on.

    prompt_style: one of PROMPT_STYLES.
    end_of_conversation_token: the flag's; None: the chat template's end of a turn, or the tokenizer's eos.
    template_kwargs: variables of the chat template for every row.
    prompt_begin, prompt_end: the text around the question, "" for the usual one: the white space before "Human:", and
        "Assistant:" with its white space, which also stands between turns; as_stored: the white space at the end.
    """

    prompt_style: str
    end_of_conversation_token: str | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    prompt_begin: str = field(default="", compare=False)
    prompt_end: str = field(default="", compare=False)

    @property
    def frame(self) -> tuple[str, str]:
        """The text before "Human:" and the text behind the question."""
        return self.prompt_begin, self.prompt_end or FRAME[1]

    def __str__(self) -> str:
        end = "" if self.end_of_conversation_token is None else f", end token {self.end_of_conversation_token}"
        return self.prompt_style + end + in_words(self.template_kwargs)

    @classmethod
    def of(cls, chat: ChatArguments) -> SavedStyle:
        """The record that is saved with the model, from resolved flags (see `resolved_chat`)."""
        assert chat.prompt_style != AUTO, "resolved flags name a style"
        return cls(chat.prompt_style, chat.end_of_conversation_token, chat.template_kwargs)


@dataclass(frozen=True)
class PromptStyle:
    """The form in which a run writes prompts and ends responses.

    chat: the resolved flags.
    end_token: that ends a response.
    reason: where the style comes from, and what differs from the model's training.
    is_open: True if the rows decide between the styles without a template.
    saved_as: the style that is saved with the model; None where none is.
    """

    chat: ChatArguments
    end_token: str
    reason: str
    is_open: bool = False
    saved_as: str | None = None

    @property
    def sentence(self) -> str:
        """One line for a log; a warning where the model was trained with another style."""
        style = f"{self.chat.prompt_style}{in_words(self.chat.template_kwargs)}"
        warning = "" if self.saved_as in (None, self.chat.prompt_style) else "warning: "
        return f"{warning}prompt style: {style}, responses end with {self.end_token} ({self.reason})"


def in_words(template_kwargs: dict[str, Any]) -> str:
    """A chat template's variables, each after a comma."""
    return "".join(f", {name} {json.dumps(value)}" for name, value in template_kwargs.items())


def save_style(tokenizer: Any, style: SavedStyle) -> None:
    """Note the style in `tokenizer`, which writes it wherever it is saved."""
    tokenizer.init_kwargs[KEY] = {
        "prompt_style": style.prompt_style,
        "end_of_conversation_token": style.end_of_conversation_token,
        "chat_template_kwargs": style.template_kwargs,
        **{key: text for key in ("prompt_begin", "prompt_end") if (text := getattr(style, key))},
    }


def saved_style(tokenizer: Any) -> SavedStyle | None:
    """The style that the tokenizer's model was trained with; None if none is saved. ThreestepError if not ours."""
    saved = getattr(tokenizer, "init_kwargs", {}).get(KEY)
    if saved is None:
        return None
    where = f"tokenizer_config.json of '{tokenizer.name_or_path}': {KEY}"
    if not isinstance(saved, dict):
        raise ThreestepError(f"{where}: expected an object with prompt_style, got {saved!r:.60}; remove it")
    name, end, kwargs = (
        saved.get(key) for key in ("prompt_style", "end_of_conversation_token", "chat_template_kwargs")
    )
    if name not in PROMPT_STYLES:
        raise ThreestepError(
            f"{where}.prompt_style: expected one of {', '.join(PROMPT_STYLES)}, got {name!r}"
            f"{nearest_names(str(name), PROMPT_STYLES)}; correct it, or set --prompt_style"
        )
    if not isinstance(end, str | None) or not isinstance(kwargs, dict | None):
        raise ThreestepError(
            f"{where}: expected end_of_conversation_token to be text and chat_template_kwargs an object, got {end!r} "
            f"and {kwargs!r:.60}; correct them, or remove '{KEY}' and set --prompt_style"
        )
    begin, ending = (text if isinstance(text := saved.get(key), str) else "" for key in ("prompt_begin", "prompt_end"))
    return SavedStyle(name, end, kwargs or {}, begin, ending)


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
            f"{' and '.join(chat.template_flags)}: the tokenizer of '{tokenizer.name_or_path}' has no chat template; "
            f"pass one with --chat_template FILE, or remove {' and '.join(chat.template_flags)}"
        )
    return HUMAN_ASSISTANT, "the tokenizer has no chat template"


def _is_same(chat: ChatArguments, saved: SavedStyle | None, tokenizer: Any) -> bool:
    """True if resolved flags and the model agree on the style and, if one is used, on the template."""
    if saved is None or saved.prompt_style != chat.prompt_style:
        return False
    return chat.chat_template is None or chat.given_template == tokenizer.chat_template


# The style of a run.


def read_style(chat: ChatArguments, tokenizer: Any) -> PromptStyle:
    """Return the style and end token that these flags give with this tokenizer, and why. ThreestepError if they cannot
    be used."""
    resolved = resolved_chat(chat, tokenizer)
    end_token = conversation_end(resolved, tokenizer) or tokenizer.eos_token
    saved = saved_beside(chat, tokenizer)
    _, reason = _chosen(chat, saved, tokenizer)
    differ = [] if saved is None else _differences(chat, saved, resolved.prompt_style, tokenizer, end_token=end_token)
    if differ:
        reason += f"; '{tokenizer.name_or_path}' was trained with {' and '.join(differ)}"
    if chat.template_kwargs and resolved.prompt_style == CHAT_TEMPLATE:
        _check_variables(chat, tokenizer)
    return PromptStyle(resolved, end_token, reason)


def _differences(
    chat: ChatArguments, saved: SavedStyle, prompt_style: str, tokenizer: Any, *, end_token: str
) -> list[str]:
    """Parts of the style saved with the model that differ from this one."""
    if saved.prompt_style != prompt_style:
        return [saved.prompt_style]
    chat = replace(chat, prompt_style=prompt_style)
    if not _is_same(chat, saved, tokenizer):
        return ["another chat template"]
    as_saved = replace(chat, end_of_conversation_token=saved.end_of_conversation_token)
    was, given = conversation_end(as_saved, tokenizer) or tokenizer.eos_token, chat.template_kwargs
    ends = [] if was == end_token else [f"the end token {was}"]
    kwargs = saved.template_kwargs.items()
    return ends + [f"{name} {json.dumps(value)}" for name, value in kwargs if given.get(name, value) != value]


def _templates(chat: ChatArguments, tokenizer: Any) -> Any:
    """The text of `--chat_template`, or the tokenizer's own: a text, or several by name."""
    return tokenizer.chat_template if chat.chat_template is None else chat.given_template


def _check_variables(chat: ChatArguments, tokenizer: Any) -> None:
    """Raise ThreestepError for a variable of the flags that no template names."""
    templates = _templates(chat, tokenizer)
    texts = templates.values() if isinstance(templates, dict) else [templates]
    known = {name for text in texts for name in ChatTemplate(text, {}).names}
    if unknown := sorted(set(chat.template_kwargs) - known):
        raise ThreestepError(
            f"--chat_template_kwargs: the chat template of {chat.chat_template or named_tokenizer(tokenizer)} does not "
            f"use {', '.join(map(repr, unknown))}; correct the name, or remove it"
        )


def adopt_style(tokenizer: Any, chat: ChatArguments, began_with: str | None = None) -> PromptStyle:
    """Return `read_style`'s style, and write it and the template of `--chat_template` into `tokenizer`, with which they
    are saved.

    began_with: the style of the run that is resumed, which it keeps where the flags leave that open.
    """
    if chat.prompt_style == AUTO and began_with is not None:
        style = read_style(replace(chat, prompt_style=began_with), tokenizer)
        style = replace(style, reason="as when the run started")
    else:
        style = read_style(chat, tokenizer)
        style = replace(style, is_open=chat.prompt_style == AUTO and style.chat.prompt_style != CHAT_TEMPLATE)
    if chat.chat_template is not None:
        tokenizer.chat_template = chat.given_template
    saved, found = saved_beside(chat, tokenizer), SavedStyle.of(style.chat)
    if saved is not None and saved.prompt_style == found.prompt_style:
        found = replace(found, prompt_begin=saved.prompt_begin, prompt_end=saved.prompt_end)
    save_style(tokenizer, found)
    return replace(style, saved_as=None if saved is None else saved.prompt_style)


def conversation_end(chat: ChatArguments, tokenizer: Any) -> str | None:
    """The token that ends a response: the flag's, or the chat template's end of a turn; None: the tokenizer's eos."""
    chat = resolved_chat(chat, tokenizer)
    if chat.prompt_style != CHAT_TEMPLATE:
        return chat.end_of_conversation_token
    return ChatTokenizer(chat, tokenizer).end_token


def text_maker(chat: ChatArguments, tokenizer: Any) -> TextTokenizer | ChatTokenizer:
    """The tokenizer of texts, or under a chat template of conversations."""
    chat = resolved_chat(chat, tokenizer)
    if chat.prompt_style == CHAT_TEMPLATE:
        return ChatTokenizer(chat, tokenizer)
    return TextTokenizer(tokenizer, chat.end_of_conversation_token)


def parts_of_chat(chat: ChatArguments, tokenizer: Any, chooses_turns: bool) -> dict[str, str]:
    """Inputs of the cache's fingerprint that rows depend on besides the tokenizer. chooses_turns: they do on
    `--train_turns`."""
    chat = resolved_chat(chat, tokenizer)
    if chat.prompt_style != CHAT_TEMPLATE:
        return {"prompt_style": HUMAN_ASSISTANT}  # rows are the same texts in both styles without a template
    template = _templates(chat, tokenizer)
    parts = {
        "prompt_style": chat.prompt_style,
        "chat template": hash_text(json.dumps(template, sort_keys=True)),
        "chat template kwargs": json.dumps(chat.template_kwargs, sort_keys=True),
        "bad_conversations": chat.bad_conversations,
    }
    if chooses_turns:
        parts["train_turns"] = chat.train_turns
    return parts
