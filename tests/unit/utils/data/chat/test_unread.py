"""Reasoning of an answer is written by the template, or reported; no answer is learnt with an empty thought for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from training.utils.data.chat.rendering import ChatTemplate
from training.utils.data.chat.unread import (
    EMPTIED,
    MOVED,
    OMITTED,
    UNREAD_NAMES,
    UNREAD_TOOLS,
    UNREAD_VARIABLES,
    UnreadParts,
)
from training.utils.data.formats.messages import REASONING_KEYS, Conversation, checked_messages
from training.utils.data.rows.tokenize import Dropped

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}<end>{% endfor %}"
# As Qwen 3's: the thought of the last answer is written, also an empty one; of earlier ones there is none.
READS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last and not hidden %}"
    "<think>\n{{ m.KEY or '' }}\n</think>\n\n{% endif %}{{ m.content or '' }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As GLM 4.5's: earlier answers get an empty thought. And as EXAONE 4's without enable_thinking: every answer does.
EMPTIES = READS.replace("{% endif %}{{ m.c", "{% elif m.role == 'assistant' %}<think></think>{% endif %}{{ m.c")
# As DeepSeek R1's.
STRIPS = PLAIN.replace("m.content or ''", "m.content.split('</think>')[-1]")
BESIDE_CALLS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{{ m.thinking }}<call>"
    "{{ m.tool_calls[0].function.name }}{% endif %}{{ m.content or '' }}<end>{% endfor %}"
)
# As Mistral's: reasoning is a part of the content.
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}"
    "{% if part.type == 'thinking' %}[THINK]{{ part.thinking }}[/THINK]{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<end>{% endfor %}"
)
DUMPS = PLAIN.replace("m.content or ''", "m.content if m.content is string else m.content | tojson")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]


def user(text="q"):
    return {"role": "user", "content": text}


def answer(text="4", **more):
    return {"role": "assistant", "content": text, **more}


def talk(*messages, tools=None):
    return Conversation(checked_messages(list(messages), "row"), "row", tools)


def read(template, conversation, learns_all=True, **variables):
    """The rendering of what is learnt, the places out of the loss, and the notes."""
    known = ChatTemplate(template, variables)
    found, notes = UnreadParts(known).of_answer(conversation, learns_all)
    return known.render(found.messages, found.tools).text, found.untrained, notes


@pytest.mark.parametrize("read_key", REASONING_KEYS)
@pytest.mark.parametrize("given_key", REASONING_KEYS)
def test_reasoning_goes_where_the_template_reads_it(read_key, given_key):
    text, _, notes = read(READS.replace("KEY", read_key), talk(user(), answer(**{given_key: "two and two"})))
    assert text == "<user>q<end><assistant><think>\ntwo and two\n</think>\n\n4<end>"
    assert notes == (() if given_key == read_key else (MOVED,))


def test_reasoning_beside_a_call_as_a_part_and_under_the_first_key_of_several():
    both = READS.replace("m.KEY", "(m.reasoning or m.thinking)")
    for template, row, text in (
        (both, answer(reasoning_content="t"), "<think>\nt\n</think>\n\n4<end>"),
        (BESIDE_CALLS, answer("", reasoning="why", tool_calls=[CALL]), "why<call>add<end>"),
        (PARTS, answer(reasoning="why"), "[THINK]why[/THINK]4<end>"),
    ):
        found, _, notes = read(template, talk(user(), row))
        assert found == f"<user>q<end><assistant>{text}" and notes == (MOVED,)


INSIDE = talk(user(), answer("<think>\nwhy\n</think>\n\n4"))
WHY, BOTH = (
    talk(user(), answer(reasoning="why")),
    "{% if m.thinking and m.content %}{{ raise_exception('both') }}{% endif %}",
)
GIVEN_TOOLS = talk(user(), answer(), tools=TOOLS)
FOR_THE_USER = "{% if messages[-1].role == 'user' %}{{ tools }}{% endif %}" + PLAIN  # as Dolphin's
DATED = replace(talk(user(), answer()), template_kwargs={"date": "today"})
NAMED = talk({**user(), "name": "Ada"}, answer(name="Bo"))
WRITES_NAMES = PLAIN.replace("{{ m.role }}", "{{ m.name or m.role }}")
WRITES_ONE = WRITES_NAMES.replace("m.name or m.role", "m.name if m.role == 'user' and m.name else m.role")
ANSWERED = talk(user(), answer("", tool_calls=[CALL]), {"role": "tool", "name": "add", "content": "2"}, answer())


@pytest.mark.parametrize(
    ("template", "row", "notes"),
    [
        (READS.replace("m.KEY", "(m.reasoning or m.thinking)"), talk(user(), answer(thinking="t")), ()),
        # reasoning that is not written; the text then holds none of it
        *((PLAIN, talk(user(), answer(**{key: "why"})), (OMITTED,)) for key in REASONING_KEYS),
        (BESIDE_CALLS, WHY, (OMITTED,)),
        (DUMPS, WHY, (OMITTED,)),
        (STRIPS, WHY, (OMITTED,)),
        (STRIPS, INSIDE, (OMITTED,)),
        (BESIDE_CALLS.replace("{{ m.thinking }}", BOTH + "{{ m.thinking }}"),
         talk(user(), answer("text", reasoning="why", tool_calls=[CALL])), (OMITTED,)),
        (PLAIN, talk(user(), answer("a <think> and </think> b")), ()),
        # nobody gave a thought
        (READS.replace("KEY", "reasoning"), talk(user(), answer()), ()),
        (READS.replace("KEY", "reasoning"), talk(user(), answer(reasoning=" \n")), ()),
        # tools
        (PLAIN, GIVEN_TOOLS, (UNREAD_TOOLS,)),
        ("{{ tools }}" + PLAIN, GIVEN_TOOLS, ()),
        (PLAIN, talk(user(), answer()), ()),
        (FOR_THE_USER, GIVEN_TOOLS, (UNREAD_TOOLS,)),
        (FOR_THE_USER, talk(user(), answer(), user(), tools=TOOLS), ()),
        # variables of a row
        (PLAIN, DATED, (UNREAD_VARIABLES,)),
        ("{{ date }}" + PLAIN, DATED, ()),
        # names of speakers
        (PLAIN, NAMED, (UNREAD_NAMES,)),
        (WRITES_NAMES, NAMED, ()),
        (WRITES_ONE, NAMED, (UNREAD_NAMES,)),
        (WRITES_ONE, talk({**user(), "name": "Ada"}, answer(name="assistant")), ()),
        (PLAIN, ANSWERED, ()),
    ],
)  # fmt: skip
def test_what_the_template_does_not_write(template, row, notes):
    text, untrained, found = read(template, row)
    assert found == notes and not untrained and ("why" in text) is False


def test_a_name_that_is_empty_is_none():
    assert UnreadParts(ChatTemplate(PLAIN, {})).of_prompt(talk({**user(), "name": ""}))[1] == ()


def test_reasoning_of_earlier_answers_is_the_templates_affair():
    template = READS.replace("KEY", "reasoning")
    row = talk(user(), answer("3", reasoning="one"), user("r"), answer(reasoning="two"))
    text, untrained, notes = read(template, row)
    assert "one" not in text and "two" in text and not untrained and notes == ()
    assert read(template, talk(*row.messages, user("s")))[1:] == (frozenset(), ())


def test_no_empty_thought_is_learnt_where_one_was_given():
    row = talk(user(), answer("3", reasoning="one"), user("r"), answer(reasoning="two"))
    text, untrained, notes = read(EMPTIES.replace("KEY", "thinking"), row)
    assert text == "<user>q<end><assistant><think></think>3<end><user>r<end><assistant><think>\ntwo\n</think>\n\n4<end>"
    assert untrained == {1} and notes == (MOVED, EMPTIED)
    _, untrained, notes = read(EMPTIES.replace("KEY", "thinking"), row, learns_all=False)
    assert not untrained and notes == (MOVED,)
    with pytest.raises(Dropped, match="unread_reasoning"):
        read(EMPTIES.replace("KEY", "thinking"), row, hidden=True)
    opened = EMPTIES.replace("KEY", "thinking").replace("<assistant>{%", "<assistant><think></think>{%")
    assert read(opened, row, hidden=True)[1:] == (frozenset(), (OMITTED,))  # the prompt's, which no answer learns


def test_thoughts_in_the_content_move_where_the_template_wants_them_apart():
    for template in (READS, STRIPS.replace("{{ m.content", "{{ '[' + m.KEY + ']' if m.KEY }}{{ m.content")):
        text, _, notes = read(template.replace("KEY", "reasoning"), INSIDE)
        assert text.count("why") == 1 and text.count("think>") in (0, 2) and notes == (MOVED,)
    splits = READS.replace("m.KEY or ''", "m.content.split('</think>')[0].split('<think>')[-1].strip()").replace(
        "m.content or ''", "m.content.split('</think>')[-1].strip()"
    )
    assert read(splits, INSIDE) == ("<user>q<end><assistant><think>\nwhy\n</think>\n\n4<end>", frozenset(), ())
