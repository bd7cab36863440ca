"""Messages of any form become OpenAI's; as text they are DeepSpeed-Chat's turns."""

from __future__ import annotations

import json
from datetime import date, datetime, timedelta
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.said import says
from training.utils.base.errors import ThreestepError
from training.utils.data.formats.messages import (
    BadConversation,
    checked_messages,
    checked_tools,
    forms_of_calls,
    messages_of_text,
    prompt_text,
    read_messages,
    read_tools,
    response_message,
    response_text,
)

CALL = {"name": "add", "arguments": {"a": 1, "b": [2]}}
CALLS = [{"type": "function", "function": CALL}]


def test_sharegpt_becomes_openais():
    said = [
        {"from": "system", "value": "Be kind."},
        {"from": "human", "value": "1 + 2?"},
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "3.", "weight": 0},
    ]
    assert read_messages(said, "row") == [
        says("system", "Be kind."),
        says("user", "1 + 2?"),
        says("assistant", "", tool_calls=CALLS),
        says("tool", "3"),
        says("assistant", "3.", weight=0),
    ]


def test_openais_messages_are_kept_as_they_are():
    said = [
        says("developer", "Be kind."),
        says("user", [{"type": "text", "text": "Hi"}]),
        says("assistant", "Ho", reasoning_content="Hm", name="Ann"),
    ]
    joined = [said[0], says("user", "Hi"), said[2]]
    assert read_messages(said, "row") == joined
    assert read_messages(json.dumps(said), "row") == joined  # a column of JSON text, as in CSV
    assert read_messages(said[2], "row") == said[2:]  # one message alone
    assert read_messages(None, "row") is None and read_messages("", "row") is None and read_messages([], "row") == []


@pytest.mark.parametrize(
    "calls",
    [
        CALLS,
        CALL,
        [CALL],
        json.dumps(CALLS),
        [{"type": "function", "function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}],
    ],
)
@pytest.mark.parametrize("content", [None, ""])
def test_tool_calls_in_every_form(calls, content):
    """Arguments and content stay as they are given: templates want one form or the other."""
    (read,) = read_messages([{"role": "assistant", "content": content, "tool_calls": calls}], "row")
    arguments = calls[0]["function"]["arguments"] if isinstance(calls, list) and "function" in calls[0] else None
    given = [{"type": "function", "function": {**CALL, "arguments": arguments or CALL["arguments"]}}]
    assert read == says("assistant", content, tool_calls=given)
    objects = list(forms_of_calls([read]))
    assert says("assistant", "", tool_calls=CALLS) in [form[0] for form in objects]
    texts = [{"type": "function", "function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}]
    assert says("assistant", None, tool_calls=texts) in [form[0] for form in objects] and len(objects) == 4


def test_calls_without_arguments_have_none_in_every_form():
    for none in ({}, {"arguments": None}, {"arguments": ""}, {"arguments": " null "}, {"arguments": {}}):
        (read,) = read_messages([says("assistant", "", tool_calls=[{"name": "now", **none}])], "row")
        assert read["tool_calls"] == [{"type": "function", "function": {"name": "now", "arguments": {}}}]


def test_openais_older_names_for_calls():
    said = [{"role": "assistant", "function_call": CALL}, {"role": "function", "name": "add", "content": "3"}]
    assert read_messages(said, "row") == [
        says("assistant", None, tool_calls=CALLS), says("tool", "3", name="add")
    ]  # fmt: skip


def test_the_id_of_a_call_and_arguments_that_are_no_object_are_kept():
    call = {"id": "7", "type": "function", "function": {"name": "add", "arguments": "{broken"}}
    (read,) = read_messages([says("assistant", "", tool_calls=[call, {"name": "stop"}])], "row")
    assert read["tool_calls"] == [call, {"type": "function", "function": {"name": "stop", "arguments": {}}}]
    said = [says("assistant", None, tool_calls=json.dumps(CALLS), function_call=None)]
    before = json.dumps(said)
    read_messages(said, "row")
    assert json.dumps(said) == before  # what is given is left alone


NO_LIST, NO_CALL = (
    "f.json, line 2: expected a list of messages, got ",
    "a tool call: expected an object with 'name' and ",
)


def calling(calls):
    return [says("assistant", "", tool_calls=calls)]


@pytest.mark.parametrize(
    ("given_messages", "fragment"),
    [
        (7, NO_LIST + "a number"),
        ("Hi there", NO_LIST + "text that is not JSON (Expecting value): 'Hi t"),
        ('"Hi"', NO_LIST + "text"),
        (["Hi"], "f.json, line 2, message 1: expected an object, got text"),
        ([says("user", "a"), {}], "message 2: expected 'role' and 'content', or ShareGPT's 'from' and 'value', got"),
        ([{"speaker": "x", "text": "y"}], "'from' and 'value', got 'speaker', 'text'"),
        ([{"role": "user"}], "message 1: expected 'role' and 'content', or ShareGPT's 'from' and 'value', got 'role'"),
        ([{"from": "gpt", "text": "y"}], "'from' and 'value', got 'from', 'text'"),
        ([{"role": None, "content": "a"}], "message 1: 'role': expected text, got null"),
        ([{"role": "user", "content": 7}], "message 1: 'content': expected text, got a number"),
        ([{"from": "alien", "value": "a"}], "message 1: 'from': expected one of system, human, user, gpt"),
        ([{"from": [["gpt"]], "value": "a"}], "message 1: 'from': expected one of system, human, user, gpt"),
        ([{"from": "gpt", "value": {}}], "message 1: 'content': expected text, got an"),
        ([{"from": "function_call", "value": "add(1)"}], "expected JSON with the name and arguments of a call, got"),
        ([{"from": "function_call", "value": '"add"'}], NO_CALL),
        (calling([{"id": 1}]), NO_CALL),
        (calling([{"function": 1}]), NO_CALL),
        (calling([{"function": "name"}]), NO_CALL),
        (calling("add"), "expected JSON with the name and arguments of a call, got"),
        # pandas and `datasets` write it into CSV
        (str([says("user", "Hi")]), "it looks like Python, so write it with json.dumps"),
    ],
)
def test_what_is_no_message_is_named(given_messages, fragment):
    with pytest.raises(ThreestepError) as caught:
        read_messages(given_messages, "f.json, line 2")
    assert fragment in str(caught.value) and str(caught.value).startswith("f.json, line 2")


PARAMETERS = {"type": "object", "properties": {"a": {"type": "number"}}}
BARE = {"name": "add", "parameters": PARAMETERS}
WHOLE = {"type": "function", "function": BARE}
FLAT = {"name": "add", "parameters": json.dumps(PARAMETERS)}


@pytest.mark.parametrize(
    "given_tools",
    [
        [WHOLE],
        [BARE],
        BARE,
        json.dumps([WHOLE]),
        json.dumps([BARE]),
        json.dumps(json.dumps([WHOLE])),
        json.dumps(WHOLE),
        [json.dumps(WHOLE)],
        json.dumps([json.dumps(WHOLE)]),
        [json.dumps(json.dumps(WHOLE))],
        [json.dumps(BARE)],
        [{**WHOLE, "function": json.dumps(BARE)}],
        [{**WHOLE, "function": FLAT}],
        [{**WHOLE, "function": json.dumps(FLAT)}],
        [FLAT],
    ],
)
def test_tools_and_their_parts_may_be_json_text(given_tools):
    assert read_tools(given_tools, "row") == [WHOLE]
    if isinstance(given_tools, list):
        assert [tool.get("function", tool) for tool in checked_tools(given_tools, "row")] == [BARE]


def test_no_tools_and_what_is_none():
    for nothing in ("null", "[]", '""', " ", "", None, [], {}, "{}"):
        assert read_tools(nothing, "row") is None
    assert checked_tools(np.array([BARE]), "row") == [BARE]
    assert checked_tools(None, "row") is checked_tools("", "row") is checked_tools([], "row") is None
    assert read_tools([{"type": "web_search"}], "row") == [{"type": "web_search"}]
    with pytest.raises(ThreestepError, match="row: tools: expected a JSON list of objects, got text"):
        read_tools(["add"], "row")
    with pytest.raises(ThreestepError, match="row: expected a list of tools, got text that is not JSON"):
        read_tools("add", "row")
    with pytest.raises(BadConversation, match="row: expected tools to be a list of objects .* got 'add'"):
        checked_tools("add", "row")


def test_nulls_in_json_text_are_meant():
    call = {"name": "add", "arguments": {"a": None, "b": 1}}
    said = [says("assistant", "", tool_calls=[call, {**call, "arguments": '{"a": null}'}])]
    for given_messages in (said, json.dumps(said)):
        (read,) = read_messages(given_messages, "row")
        assert [each["function"]["arguments"] for each in read["tool_calls"]] == [{"a": None, "b": 1}, '{"a": null}']
    other = {"name": "add", "parameters": {"a": None, "b": 1}}
    for given_tools in (json.dumps([other]), [json.dumps(other)]):
        assert read_tools(given_tools, "row")[0]["function"] == other


@pytest.mark.parametrize("value", [datetime(2024, 1, 2), date(2024, 1, 2), timedelta(1), Decimal("1.50")])
def test_values_that_a_typed_column_has_changed_are_refused(value):
    """Their text was not theirs alone: 1.50 and 1.5, 2024-01-02 and 2024-01-02T00:00:00 are one value."""
    call = {"name": "add", "arguments": {"x": [{"y": value}]}}
    with pytest.raises(ThreestepError, match=r"^row: expected JSON values, got a \w+ \(.*\); write it as text"):
        read_messages([says("assistant", "", tool_calls=[call])], "row")
    with pytest.raises(ThreestepError, match=r"^row: tools: expected JSON values, got a"):
        read_tools([{"name": "add", "default": value}], "row")


# --- as text


def test_the_text_of_a_conversation():
    said = [says("user", "Hi"), says("assistant", "Yes?"), says("user", "Sing.")]
    assert prompt_text(said, None, "row") == "Human: Hi Assistant: Yes? Human: Sing. Assistant:"
    assert response_text([says("assistant", "La")], "row") == " La"
    assert response_text([says("assistant", "La"), says("user", "On")], "row") == " La Human: On"


def test_the_text_of_tools_and_their_calls():
    said = [
        says("system", "Add."),
        says("user", [{"type": "text", "text": "1 + "}, {"type": "text", "text": "2?"}]),
        says("assistant", "Let me see.", tool_calls=CALLS),
        says("tool", "3"),
    ]
    assert prompt_text(said, [{"type": "x"}], "row") == (
        'Tools: [{"type": "x"}] System: Add. Human: 1 + 2? Assistant: Let me see.\n'
        '{"name": "add", "arguments": {"a": 1, "b": [2]}} Tool: 3 Assistant:'
    )
    assert response_text(said[2:3], "row").endswith('{"a": 1, "b": [2]}}')
    assert response_text([says("assistant", "3", reasoning_content="1 and 2")], "row") == (
        " <think>\n1 and 2\n</think>\n\n3"
    )


def test_what_text_cannot_say():
    with pytest.raises(ThreestepError, match="f, line 1: a message's role: expected one of .*got 'critic'"):
        prompt_text([says("critic", "Hm")], None, "f, line 1")
    picture = [{"type": "image_url", "image_url": {"url": "a.png"}}]
    with pytest.raises(ThreestepError, match="f, line 1: a message's content: expected text, got .*image_url"):
        prompt_text([says("user", picture)], None, "f, line 1")


SPEAKERS = {"human": "user", "gpt": "assistant", "system": "system", "observation": "tool"}
TURNS = st.lists(st.tuples(st.sampled_from(sorted(SPEAKERS)), st.text()), max_size=6)


@settings(max_examples=50, deadline=None)
@given(TURNS)
def test_both_forms_say_the_same(turns):
    sharegpt = [{"from": speaker, "value": said} for speaker, said in turns]
    openai = [{"role": SPEAKERS[speaker], "content": said} for speaker, said in turns]
    read = read_messages(sharegpt, "row")
    assert read == openai == read_messages(read, "row")
    text = prompt_text(read, None, "row")
    assert text.endswith("Assistant:") and all(said in text for _, said in turns)
    assert text == prompt_text(read[:-1], None, "row").removesuffix("Assistant:") + prompt_text(read[-1:], None, "row")


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


def part(kind, **more):
    return [{"role": "user", "content": [{"type": kind, **more}]}]


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ("hello", "row 3: expected a list of messages, got text"),
        (["hello"], "row 3, message 1: expected an object with role and content, got text"),
        ([{"role": "user", "content": "a"}, {"role": "usr"}], "row 3, message 2: .*got 'usr'; did you mean 'user'"),
        ([{"content": "a"}], "row 3, message 1: expected one of the roles system, developer, .*, got None"),
        ([{"role": "user", "content": 5}], "expected content that is text or a list of parts.*got 5"),
        ([{"role": "user", "content": ["a"]}], "expected content that is text or a list of parts"),
        (part("image"), "a content part has the type 'image', but only text"),
        (
            part("tool_use", name="f", input={}),
            "type 'tool_use', which is a tool call; write it as the message's 'tool",
        ),
        (part("tool_result", content="4"), "which is a tool result; write it as a message with the role 'tool'"),
        (part("mcp_tool_use"), "which is a tool call; write it as the message's 'tool_calls'"),
        (part("web_search_tool_result"), "which is a tool result; write it as a m"),
        (part("redacted_thinking"), "which is encrypted reasoning, .*; remove it, or"),
        (part("thinking", thinking="hm"), "which is reasoning; write it as the message's 'reasoning_content'"),
        (
            part("document", source={}),
            "type 'document', which is not read; write it as",
        ),
        ([{"role": "user", "content": "a", "images": ["b.png"]}], "message 1: 'images': expected text, got images"),
        ([{"role": "assistant", "reasoning_content": ["a"]}], "expected reasoning_content to be text, got a list"),
        ([{"role": "assistant", "tool_calls": "add(1)"}], r"expected tool_calls to be a list .*'add\(1\)'"),
    ],
)
def test_what_is_no_conversation(messages, sentence):
    with pytest.raises(BadConversation, match=sentence):
        checked_messages(messages, "dataset 'x', row 3")


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
