"""Messages of every source in one shape; plain texts as messages."""

from __future__ import annotations

import numpy as np
import pytest

from training.utils.data.formats.messages import (
    BadConversation,
    checked_messages,
    checked_tools,
    messages_of_text,
    response_message,
)


def test_what_is_in_shape_is_left_alone():
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"text": " and b"}]},
        {"role": "assistant", "content": "c", "reasoning_content": "d"},
    ]
    assert checked_messages(messages, "row") == [messages[0], {"role": "user", "content": "b and b"}, messages[2]]


def test_what_parquet_gives():
    """Arrays for lists, and every key of every row, most of them None."""
    call = {"function": {"name": "add", "arguments": '{"x": 1}', "strict": None}, "id": None}
    given = np.array([{"role": "assistant", "content": None, "tool_calls": np.array([call, call]), "name": None}])
    made = {"function": {"name": "add", "arguments": '{"x": 1}'}}
    assert checked_messages(given, "row") == [{"role": "assistant", "content": None, "tool_calls": [made, made]}]
    without = {"role": "assistant", "content": None, "tool_calls": np.array([])}
    assert checked_messages([without], "row") == [{"role": "assistant", "content": ""}]


def test_a_refusal_is_the_text_of_its_answer():
    """Under OpenAI's key: an empty turn would be trained in its place."""
    for content in ({}, {"content": None}, {"content": ""}):
        (message,) = checked_messages([{"role": "assistant", **content, "refusal": "No."}], "row")
        assert message["content"] == "No."
    for refusal in ("", None):
        (message,) = checked_messages([{"role": "assistant", "content": "Yes.", "refusal": refusal}], "row")
        assert message["content"] == "Yes."


def test_arguments_that_are_no_object_stay_text():
    (message,) = checked_messages([{"role": "assistant", "tool_calls": '[{"name": "f", "arguments": "x = 1"}]'}], "row")
    assert message["tool_calls"] == [{"name": "f", "arguments": "x = 1"}]
    nulls = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"x": null}'}]}
    assert checked_messages([nulls], "row")[0]["tool_calls"][0]["arguments"] == '{"x": null}'


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ("hello", "row 3: expected a list of messages, got text"),
        (["hello"], "row 3, message 1: expected an object with role and content, got text"),
        ([{"role": "user", "content": "a"}, {"role": "usr"}], "row 3, message 2: .*got 'usr'; did you mean 'user'"),
        ([{"content": "a"}], "row 3, message 1: expected a role among system, developer, .*, got None"),
        ([{"role": "user", "content": 5}], "expected content that is text or a list of parts.*got 5"),
        ([{"role": "user", "content": ["a"]}], "expected content that is text or a list of parts"),
        ([{"role": "user", "content": [{"type": "image"}]}], "a content part of type 'image': expected text, and only"),
        (
            [{"role": "assistant", "content": [{"type": "tool_use", "name": "f", "input": {}}]}],
            "part of type 'tool_use': expected text, got a tool call; write it as 'tool_calls' of the message",
        ),
        (
            [{"role": "user", "content": [{"type": "tool_result", "content": "4"}]}],
            "expected text, got a tool's answer; write it as a message of the role 'tool'",
        ),
        ([{"role": "user", "content": [{"type": "mcp_tool_use"}]}], "got a tool call; write it as 'tool_calls'"),
        ([{"role": "user", "content": [{"type": "web_search_tool_result"}]}], "got a tool's answer; write it as a m"),
        ([{"role": "user", "content": [{"type": "redacted_thinking"}]}], "got encrypted reasoning, .*; remove it, or"),
        (
            [{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}],
            "expected text, got reasoning; write it as 'reasoning_content' of the message",
        ),
        (
            [{"role": "user", "content": [{"type": "document", "source": {}}]}],
            "a content part of type 'document': expected text, and parts of this type are not read; write it as text",
        ),
        ([{"role": "user", "content": "a", "images": ["b.png"]}], "message 1: 'images': expected text, got images"),
        ([{"role": "assistant", "reasoning_content": ["a"]}], "expected reasoning_content to be text, got a list"),
        ([{"role": "assistant", "tool_calls": "add(1)"}], r"expected tool_calls to be a list .*'add\(1\)'"),
    ],
)
def test_what_is_no_conversation(messages, sentence):
    with pytest.raises(BadConversation, match=sentence):
        checked_messages(messages, "dataset 'x', row 3")


def test_tools():
    assert checked_tools('[{"name": "add"}]', "row") == checked_tools(np.array([{"name": "add"}]), "row")
    assert checked_tools(None, "row") is checked_tools("", "row") is checked_tools([], "row") is None
    with pytest.raises(BadConversation, match="row: expected tools to be a list of objects .* got 'add'"):
        checked_tools("add", "row")


def test_plain_texts():
    assert messages_of_text("Human: a Assistant:") == [{"role": "user", "content": "a"}]
    assert messages_of_text("\n\nHuman: a\n\nAssistant:") == [{"role": "user", "content": "a"}]
    assert messages_of_text(" What did Human: say? ") == [{"role": "user", "content": " What did Human: say? "}]
    assert messages_of_text("Human:   a\n Assistant: ") == [{"role": "user", "content": "  a\n"}]
    assert messages_of_text("Human: a, Human: b Assistant: c Assistant:") == [
        {"role": "user", "content": "a, Human: b Assistant: c"}
    ]
    for prompt, kept in (("Human: a Assistant:", "   return x\n"), ("def a():\n", "    return x\n")):
        assert response_message(prompt, "    return x\n") == {"role": "assistant", "content": kept}


def test_turns_inside_a_plain_text():
    text = "\n\nHuman: a\n\nAssistant: b\nAssistant: c\n\nHuman: d\n\nAssistant:"
    assert messages_of_text(text) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b\nAssistant: c"},
        {"role": "user", "content": "d"},
    ]
