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


def test_the_template_where_the_tokenizer_has_one():
    style = read_style(ChatArguments(), with_template())
    assert (style.chat.prompt_style, style.end_token) == ("chat_template", "<|im_end|>")
    assert style.sentence == (
        "prompt style: chat_template, responses end with <|im_end|> (the tokenizer has a template)"
    )
    plain = read_style(ChatArguments(), with_template(None))
    assert (plain.chat.prompt_style, plain.end_token) == ("human_assistant", "<|endoftext|>")
    assert "(the tokenizer has no chat template)" in plain.sentence
    named = read_style(ChatArguments(prompt_style="human_assistant"), with_template())
    assert (named.chat.prompt_style, named.end_token, named.reason) == (
        "human_assistant",
        "<|endoftext|>",
        "--prompt_style",
    )


def test_the_file_of_a_template_is_a_style(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(chat_template("llama3"))
    style = read_style(ChatArguments(chat_template=str(path)), with_template(None))
    assert (style.chat.prompt_style, style.end_token, style.reason) == (
        "chat_template",
        "<|eot_id|>",
        "--chat_template",
    )


def test_flags_of_a_template_without_one_are_a_mistake():
    with pytest.raises(
        ThreestepError, match=r"--chat_template_kwargs expects a chat template, got a tokenizer without one"
    ):
        read_style(ChatArguments(chat_template_kwargs='{"enable_thinking": false}'), with_template(None))


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


def test_a_variable_that_no_template_reads(tmp_path):
    """A misspelt name of a flag; one that is saved with a model does no harm to its next program."""
    misspelt = ChatArguments(chat_template_kwargs='{"enable_thinkin": false}')
    with pytest.raises(ThreestepError, match=r"the tokenizer reads no 'enable_thinkin'; correct the name, or leave it"):
        read_style(misspelt, with_template())
    several = with_template()
    several.chat_template = {"default": chat_template("chatml"), "tool_use": chat_template("strips_thinking")}
    assert read_style(
        ChatArguments(chat_template_kwargs='{"enable_thinking": true}'), several
    ).chat.template_kwargs == {"enable_thinking": True}
    with pytest.raises(ThreestepError, match="has no chat template of its own"):
        read_style(
            ChatArguments(prompt_style="chat_template", chat_template_kwargs='{"enable_thinking": true}'),
            with_template(None),
        )
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
    assert (style.chat.prompt_style, style.reason) == ("human_assistant", "as the run began")
    assert saved_style(tokenizer) == SavedStyle("human_assistant")
    style = adopt_style(with_template(), ChatArguments(prompt_style="chat_template"), began_with="human_assistant")
    assert style.chat.prompt_style == "chat_template"  # named by a flag; that it differs is refused elsewhere


@pytest.mark.parametrize(
    "content, message",
    [
        (
            {"prompt_style": "chat_templat"},
            "expected one of human_assistant, as_stored, chat_template, got 'chat_templat'; did you mean",
        ),
        ({}, "expected one of human_assistant, as_stored, chat_template, got None.*give --prompt_style"),
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
