"""Calls: the form that a template writes, the end of a turn that calls, and what marks may not hide."""

from __future__ import annotations

import json

import pytest

from tests.support.said import assistant, user
from training.utils.data.chat.rendering import ChatTemplate
from training.utils.data.chat.spans import ReadConversation, TurnFinder
from training.utils.data.formats.messages import BadConversation, Conversation, checked_messages

CONTROL = [
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|user|>", "<|assistant|>",
    "<|observation|>", "<eos>", "<bos>", "<answer|>", "<|quote|>", "<call|>", "<|result|>",
]  # fmt: skip
USER, ANSWER = user("u"), assistant("answer")
ARGUMENTS = [
    {}, {"a": 1}, {"a": -2.5, "b": 10**12}, {"on": True, "off": False}, {"a": None}, {"a": "x"}, {"a": 'q"\\\n'},
    {"a": [1, {"b": [True, None, "x"]}], "c": {}}, {"a": "x", "b": 7}, {"a": ""},
]  # fmt: skip

HARMONY = (  # one call a message, behind a control token; the last answer ends with another token
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant{% if m.tool_calls %}"
    "{% set c = m.tool_calls[0].function %} to={{ c.name }}<|channel|>json<|message|>"
    "{{ c.arguments | tojson }}<|call|>"
    "{% else %}<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
OPEN = (  # the next speaker's token ends a turn
    "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>{{ m.content }}{% else %}<|{{ m.role }}|>"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}<k>{{ k }}</k><v>{{ v if v is string else v | tojson }}</v>"
    "{% endfor %}</call>{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
QUOTES = (  # texts between control tokens; a tool's answer goes on in the turn of the call
    "{% for m in messages %}{% if m.role == 'tool' %}{{ m.content }}<|end|>"
    "{% else %}{% if not (m.role == 'assistant' and loop.index0 and messages[loop.index0 - 1].role == 'tool') %}"
    "<|start|>{{ m.role }}\n{% endif %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}call:{{ c.function.name + '{' }}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}:"
    "{{ '<|quote|>' ~ v ~ '<|quote|>' if v is string else v | tojson }},{% endfor %}}<call|>{% endfor %}<|result|>"
    "{% else %}{{ m.content }}<answer|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|start|>assistant\n{% endif %}"
)
TEXTS = (  # arguments joined as text, and calls only where there is no content
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% if m.content is none %}"
    "{% for c in m.tool_calls %}{{ '<call>' + c.function.name + '\n' + c.function.arguments + '</call>' }}{% endfor %}"
    "<eos>{% else %}{{ m.content + '<eos>' }}{% endif %}{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def called(*arguments, content="", names=None, **message):
    names = names or ["f"] * len(arguments)
    calls = [
        {"type": "function", "function": {"name": n, "arguments": a}} for n, a in zip(names, arguments, strict=True)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, **message}


def read(template, messages, **variables) -> ReadConversation:
    found = TurnFinder(ChatTemplate(template, variables), CONTROL)
    return found.read(Conversation(checked_messages(messages, "row"), "row"))


def turns(template, messages, **variables) -> list[str]:
    found = read(template, messages, **variables)
    assert all(turn.ended for turn in found.turns)
    return [found.text[turn.begin : turn.end] for turn in found.turns]


TOOL = {"role": "tool", "content": "t"}
FORMS = [lambda value: value, lambda value: json.dumps(value), lambda value: json.dumps(value, indent=1)]


@pytest.mark.parametrize("follows", [[], [TOOL], [TOOL, ANSWER], [{**TOOL, "content": ""}, ANSWER], [USER]])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=json.dumps)
def test_a_call_of_any_argument_ends_where_its_message_does(arguments, follows):
    for given in (form(arguments) for form in FORMS):
        messages = [USER, called(given), *follows]
        first = turns(HARMONY, messages)[0]
        assert first == f" to=f<|channel|>json<|message|>{json.dumps(arguments)}<|call|>"
        written = "".join(f"{key}:{quoted(value)}," for key, value in arguments.items())
        assert turns(QUOTES, messages)[0] == f"call:f{{{written}}}<call|><|result|>"
        written = "".join(f"<k>{key}</k><v>{plain(value)}</v>" for key, value in arguments.items())
        stop = "<|user|>" if follows == [USER] else "<|observation|>"  # where nothing follows, a tool would
        assert turns(OPEN, messages)[0] == f"<call>f{written}</call>{stop}"
        text = given if isinstance(given, str) else json.dumps(given)
        assert turns(TEXTS, messages)[0] == f"<call>f\n{text}</call><eos>"


def quoted(value):
    return f"<|quote|>{value}<|quote|>" if isinstance(value, str) else json.dumps(value)


def plain(value):
    return value if isinstance(value, str) else json.dumps(value)


def test_the_last_turn_of_an_open_template_gets_the_token_that_ends_it():
    for messages, stop in (([USER, ANSWER], "answer<|user|>"), ([USER, called({})], "<call>f</call><|observation|>")):
        found = read(OPEN, messages)
        assert found.text.endswith(stop) and found.turns[-1].end == len(found.text)
    opened = TurnFinder(ChatTemplate(OPEN, {}), CONTROL)
    asked = opened.read(Conversation([USER, ANSWER, USER], "row"), generation_prompt=True)
    assert asked.text == "<|user|>u<|assistant|>answer<|user|>u<|assistant|>"


def test_no_arguments_in_any_form():
    for given in ({}, "{}", "", "null", None):
        assert turns(HARMONY, [USER, called(given)]) == [" to=f<|channel|>json<|message|>{}<|call|>"]
        assert turns(TEXTS, [USER, called(given)]) == ["<call>f\n{}</call><eos>"]


def test_content_beside_a_call_in_any_form():
    for content in (None, ""):
        assert turns(TEXTS, [USER, called({}, content=content)]) == ["<call>f\n{}</call><eos>"]
    joins = TEXTS.replace("m.content is none", "m.tool_calls").replace("{% for c", "{{ m.content }}{% for c")
    for content in (None, ""):  # written as it is, null would become the word None
        assert turns(joins, [USER, called({}, content=content)]) == ["<call>f\n{}</call><eos>"]
        objects = joins.replace("c.function.arguments", "(c.function.arguments | tojson)")  # as MiniMax-M2's
        assert turns(objects, [USER, called({"a": None}, content=content)]) == ['<call>f\n{"a": null}</call><eos>']
    assert turns(joins, [USER, called({}, content="a")]) == ["a<call>f\n{}</call><eos>"]
    with pytest.raises(BadConversation, match="omits its call to 'f'"):
        turns(TEXTS, [USER, called({}, content="a")])


def test_arguments_are_json_where_a_template_can_write_it():
    """`~` prints an object as Python does, and JSON text as it is."""
    prints = TEXTS.replace("+ c.function.arguments +", "~ c.function.arguments ~")
    assert turns(prints, [USER, called({"a": True}, content=None)]) == ['<call>f\n{"a": true}</call><eos>']


def test_text_beside_a_call_that_a_template_leaves_out_is_counted():
    assert read(HARMONY, [USER, called({"a": 1}, content="Let me see."), TOOL, ANSWER]).left_out == 1
    assert turns(HARMONY, [USER, called({"a": 1}, content="Let me see."), TOOL, ANSWER])[0].endswith('{"a": 1}<|call|>')
    assert read(HARMONY, [USER, called({"a": 1}), TOOL, ANSWER]).left_out == 0


def test_a_value_that_a_template_leaves_out():
    only_texts = OPEN.replace("v | tojson", "''")
    with pytest.raises(BadConversation, match="the chat template omits 12 from the arguments of its call to 'f'"):
        turns(only_texts, [USER, called({"a": 12})])


def test_a_token_that_ends_each_call_does_not_end_the_turn():
    """As DeepSeek R1's: behind one call there is no other, and the tool's token ends the turn."""
    template = OPEN.replace("</call>", "<call|>")
    assert turns(template, [USER, called({}), TOOL, ANSWER])[0] == "<call>f<call|><|observation|>"


def test_a_last_call_gets_the_token_that_ends_it_where_answers_have_an_end():
    """As DeepSeek V2.5's: an answer ends with eos, one call with the token of the tool's answer."""
    template = TEXTS.replace("{% endfor %}<eos>", "{% endfor %}").replace("<|{{ m.role }}|>", "<|observation|>")
    assert turns(template, [USER, called({}), TOOL, ANSWER])[0] == "<call>f\n{}</call><|observation|>"
    assert turns(template, [USER, called({})]) == ["<call>f\n{}</call><|observation|>"]
    everyone = template.replace("<|observation|>", "<|assistant|>")  # which tells nobody from a tool
    assert not read(everyone, [USER, called({})]).turns[-1].ended


# Marks.

MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|assistant|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endgeneration %}{% generation %}<eos>{% endgeneration %}"
    "{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_marks_end_with_the_turn_and_begin_behind_the_prompt():
    assert turns(MARKED, [USER, ANSWER, USER, called({"a": 1})]) == ["answer<|end|>", '<call>f{"a": 1}<|end|>']


def test_a_mark_around_a_call_behind_the_mark_of_its_thought():
    """As diffusion_gemma_training's, where a tool's answer stands in the turn of the call."""
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}<|result|>{{ m.content }}<|end|>{% elif m.role == 'user' %}"
        "<|user|>{{ m.content }}{% else %}{% if messages[loop.index0 - 1].role != 'tool' %}<|assistant|>{% endif %}"
        "{% generation %}{{ m.reasoning or '' }}{% endgeneration %}"
        "{% generation %}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{% endfor %}{% endgeneration %}"
        "{% if m.tool_calls and loop.last %}<|result|>{% endif %}"
        "{% if not m.tool_calls %}{% generation %}{{ m.content }}<eos>{% endgeneration %}{% endif %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' %}<|assistant|>{% endif %}"
    )
    thought = called({}, reasoning="why")
    assert turns(template, [USER, thought, TOOL, ANSWER]) == ["why", "<call>f<|result|>", "answer<eos>"]


def test_marks_hide_no_call():
    no_calls = MARKED.replace("m.tool_calls or []", "[]")
    for arguments in ({}, {"a": 1}, {"a": "x"}):
        with pytest.raises(BadConversation, match="message 2 .assistant.: the chat template omits its call to 'f'"):
            turns(no_calls, [USER, called(arguments), TOOL, ANSWER])
    only_last = no_calls.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    with pytest.raises(BadConversation, match="omits its call to 'f'"):
        turns(only_last, [USER, called({"a": 1}), TOOL, ANSWER])
