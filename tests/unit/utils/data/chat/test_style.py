"""Which style a run uses: the flags', the saved one's, the tokenizer's; and what it says."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from tests.support.chat_templates import chat_template, chat_tokenizer
from training.utils.base.errors import ThreestepError
from training.utils.data.chat.style import (
    KEY,
    SavedStyle,
    adopt_style,
    parts_of_chat,
    read_style,
    resolved_chat,
    save_style,
    saved_style,
    text_maker,
)
from training.utils.data.rows.arguments import ChatArguments


def with_template(name: str | None = "strips_thinking"):
    return chat_tokenizer(None if name is None else chat_template(name))


def saved(folder, tokenizer, **flags):
    """The tokenizer as the next program loads it from the folder of a model that was trained with these flags."""
    adopt_style(tokenizer, ChatArguments(**flags))
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_the_template_where_the_tokenizer_has_one(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(chat_template("llama3"))
    for flags, template, found, reason in (
        ({}, "strips_thinking", ("chat_template", "<|im_end|>"), "the tokenizer has a template"),
        ({}, None, ("human_assistant", "<|endoftext|>"), "the tokenizer has no chat template"),
        ({"prompt_style": "human_assistant"}, "chatml", ("human_assistant", "<|endoftext|>"), "--prompt_style"),
        ({"chat_template": str(path)}, None, ("chat_template", "<|eot_id|>"), "--chat_template"),
    ):
        style = read_style(ChatArguments(**flags), with_template(template))
        assert (style.chat.prompt_style, style.end_token) == found and style.reason == reason
        assert style.sentence == f"prompt style: {found[0]}, responses end with {found[1]} ({reason})"


@pytest.mark.parametrize(
    ("template", "kwargs", "style", "said"),
    [
        (
            None,
            "enable_thinking",
            "auto",
            "--chat_template_kwargs: the tokenizer of '.*' has no chat template; pass one",
        ),
        (None, "enable_thinking", "chat_template", "has no chat template"),
        # A misspelt name of a flag.
        (
            "chatml",
            "enable_thinkin",
            "auto",
            "the tokenizer does not use 'enable_thinkin'; correct the name, or remove it",
        ),
    ],
)
def test_flags_that_no_template_reads(template, kwargs, style, said):
    given = ChatArguments(prompt_style=style, chat_template_kwargs=f'{{"{kwargs}": false}}')
    with pytest.raises(ThreestepError, match=said):
        read_style(given, with_template(template))


@pytest.mark.parametrize("style", ["human_assistant", "chat_template"])
def test_a_saved_style_is_read_by_whatever_comes_next(tmp_path, style):
    end = "<|pad|>" if style == "human_assistant" else None
    tokenizer = saved(tmp_path, with_template(), prompt_style=style, end_of_conversation_token=end)
    read = read_style(ChatArguments(), tokenizer)
    assert read.chat.prompt_style == style and read.end_token == (end or "<|im_end|>")
    assert read.reason == f"saved with '{tmp_path}'"
    assert type(text_maker(ChatArguments(), tokenizer)) is type(text_maker(read.chat, tokenizer))
    assert parts_of_chat(ChatArguments(), tokenizer, 1) == parts_of_chat(read.chat, tokenizer, 1)


def test_the_templates_variables_are_saved_too(tmp_path):
    flags = ChatArguments(chat_template_kwargs='{"date": "today", "enable_thinking": false}')
    dated = chat_tokenizer("{{ date if enable_thinking }}" + chat_template("strips_thinking"))
    tokenizer = saved(tmp_path, dated, chat_template_kwargs='{"date": "today", "enable_thinking": false}')
    resolved = resolved_chat(ChatArguments(), tokenizer)
    assert resolved.template_kwargs == flags.template_kwargs == {"date": "today", "enable_thinking": False}
    assert 'date "today", enable_thinking false' in read_style(ChatArguments(), tokenizer).sentence
    assert resolved_chat(resolved, tokenizer) == resolved
    changed = read_style(ChatArguments(chat_template_kwargs='{"enable_thinking": true}'), tokenizer)
    assert changed.chat.template_kwargs == {"date": "today", "enable_thinking": True}
    assert changed.reason.endswith(f"; '{tmp_path}' was trained with enable_thinking false")


def test_a_variable_that_only_some_template_reads(tmp_path):
    """One that is saved with a model does no harm to its next program."""
    several = with_template()
    several.chat_template = {"default": chat_template("chatml"), "tool_use": chat_template("strips_thinking")}
    flags = ChatArguments(chat_template_kwargs='{"enable_thinking": true}')
    assert read_style(flags, several).chat.template_kwargs == {"enable_thinking": True}
    kept = saved(tmp_path, with_template(), chat_template_kwargs='{"enable_thinking": false}')
    kept.chat_template = chat_template("chatml")
    assert read_style(ChatArguments(), kept).end_token == "<|im_end|>"


def test_a_flag_that_differs_wins_and_says_so(tmp_path):
    tokenizer = saved(tmp_path, with_template())
    style = read_style(ChatArguments(prompt_style="human_assistant"), tokenizer)
    assert (style.chat.prompt_style, style.end_token) == ("human_assistant", "<|endoftext|>")
    assert style.reason == f"--prompt_style; '{tmp_path}' was trained with chat_template"
    end = read_style(ChatArguments(end_of_conversation_token="<|im_end|>"), tokenizer)
    assert "was trained with" not in end.reason  # it is the template's
    save_style(tokenizer, SavedStyle("human_assistant", "<|eot_id|>"))
    end = read_style(ChatArguments(end_of_conversation_token="<|im_end|>"), tokenizer)
    assert end.end_token == "<|im_end|>" and end.reason.endswith("was trained with the end token <|eot_id|>")


def test_another_template_takes_nothing_of_the_saved_one(tmp_path):
    tokenizer = saved(tmp_path, with_template(), chat_template_kwargs='{"enable_thinking": false}')
    path = tmp_path / "mine.jinja"
    path.write_text(chat_template("llama3"))
    style = read_style(ChatArguments(chat_template=str(path)), tokenizer)
    assert style.end_token == "<|eot_id|>" and style.chat.template_kwargs == {}
    assert style.reason.endswith("was trained with another chat template")


def test_a_resumed_run_keeps_its_style():
    tokenizer = with_template()
    style = adopt_style(tokenizer, ChatArguments(), began_with="human_assistant")
    assert (style.chat.prompt_style, style.reason) == ("human_assistant", "as when the run started")
    assert saved_style(tokenizer) == SavedStyle("human_assistant")
    style = adopt_style(with_template(), ChatArguments(prompt_style="chat_template"), began_with="human_assistant")
    assert style.chat.prompt_style == "chat_template"  # named by a flag; that it differs is refused elsewhere


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"prompt_style": "chat_templat"}, "expected one of human_assistant, .*, got 'chat_templat'; did you mean"),
        ({}, "expected one of human_assistant, as_stored, chat_template, got None.*set --prompt_style"),
        ("chatml", "expected an object with prompt_style, got 'chatml'"),
        ({"prompt_style": "chat_template", "chat_template_kwargs": "x"}, "chat_template_kwargs an object, got None"),
    ],
)
def test_a_saved_style_that_is_none_of_ours_is_a_sentence(tmp_path, content, message):
    with_template().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), KEY: content}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ThreestepError, match=f"tokenizer_config.json of '{tmp_path}': {KEY}.*{message}"):
        read_style(ChatArguments(), tokenizer)
    assert read_style(ChatArguments(prompt_style="chat_template"), tokenizer).end_token == "<|im_end|>"
