"""The template of a tokenizer with several, beside transformers' own choice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from training.utils.base.errors import ThreestepError
from training.utils.data.chat.chat import template_text

TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    "templates", ["one", {"default": "d"}, {"default": "d", "tool_use": "t"}, {"default": "d", "x": "y"}]
)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_the_choice_is_transformers_where_it_has_one(templates, tools):
    tokenizer = SimpleNamespace(chat_template=templates)
    theirs = PreTrainedTokenizerFast.get_chat_template(tokenizer, tools=tools)
    assert template_text(tokenizer, tools, "tiny") == theirs


@pytest.mark.parametrize(
    ("templates", "tools", "text"),
    [
        ({"chatml": "c"}, None, "c"),
        ({"chatml": "c", "tool_use": "t"}, None, "c"),
        ({"chatml": "c", "tool_use": "t"}, TOOLS, "t"),
        ({"tool_use": "t"}, None, "t"),
    ],
)
def test_the_only_one_needs_no_name(templates, tools, text):
    assert template_text(SimpleNamespace(chat_template=templates), tools, "tiny") == text


def test_several_without_a_default():
    tokenizer = SimpleNamespace(chat_template={"rag": "r", "chatml": "c"})
    with pytest.raises(ThreestepError, match="^tiny has the chat templates 'rag', 'chatml' and none named 'default'"):
        template_text(tokenizer, None, "tiny")
