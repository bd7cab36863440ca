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


def test_a_template_that_reads_several_keys_gets_the_one_that_is_given():
    both = READS.replace("m.KEY", "(m.reasoning or m.thinking)")
    assert read(both, talk(user(), answer(thinking="t")))[2] == ()
    assert "<think>\nt\n" in read(both, talk(user(), answer(reasoning_content="t")))[0]


def test_reasoning_that_is_read_only_beside_calls():
    text, _, notes = read(BESIDE_CALLS, talk(user(), answer("", reasoning="why", tool_calls=[CALL])))
    assert text == "<user>q<end><assistant>why<call>add<end>" and notes == (MOVED,)
    text, _, notes = read(BESIDE_CALLS, talk(user(), answer(reasoning="why")))
    assert "why" not in text and notes == (OMITTED,)


def test_reasoning_as_a_part_of_the_content():
    text, _, notes = read(PARTS, talk(user(), answer(reasoning="why")))
    assert text == "<user>q<end><assistant>[THINK]why[/THINK]4<end>" and notes == (MOVED,)
    text, _, notes = read(DUMPS, talk(user(), answer(reasoning="why")))
    assert text == "<user>q<end><assistant>4<end>" and notes == (OMITTED,)


@pytest.mark.parametrize("key", REASONING_KEYS)
def test_a_template_that_reads_none(key):
    row = talk(user(), answer(**{key: "why"}))
    assert read(PLAIN, row) == ("<user>q<end><assistant>4<end>", frozenset(), (OMITTED,))


def test_a_template_that_takes_thoughts_out_of_the_content():
    inside = talk(user(), answer("<think>\nwhy\n</think>\n\n4"))
    for row in (inside, talk(user(), answer(reasoning="why"))):
        text, _, notes = read(STRIPS, row)
        assert "why" not in text and notes == (OMITTED,)
    assert read(PLAIN, inside)[2] == ()


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
    inside = talk(user(), answer("<think>\nwhy\n</think>\n\n4"))
    for template in (READS, STRIPS.replace("{{ m.content", "{{ '[' + m.KEY + ']' if m.KEY }}{{ m.content")):
        text, _, notes = read(template.replace("KEY", "reasoning"), inside)
        assert text.count("why") == 1 and text.count("think>") in (0, 2) and notes == (MOVED,)
    splits = READS.replace("m.KEY or ''", "m.content.split('</think>')[0].split('<think>')[-1].strip()").replace(
        "m.content or ''", "m.content.split('</think>')[-1].strip()"
    )
    assert read(splits, inside) == ("<user>q<end><assistant><think>\nwhy\n</think>\n\n4<end>", frozenset(), ())


def test_reasoning_of_earlier_answers_is_the_templates_affair():
    template = READS.replace("KEY", "reasoning")
    row = talk(user(), answer("3", reasoning="one"), user("r"), answer(reasoning="two"))
    text, untrained, notes = read(template, row)
    assert "one" not in text and "two" in text and not untrained and notes == ()
    assert read(template, talk(*row.messages, user("s")))[1:] == (frozenset(), ())
    assert read(template, talk(user(), answer()))[2] == ()  # nobody gave a thought
    assert read(template, talk(user(), answer(reasoning=" \n")))[2] == ()


def test_a_template_that_refuses_reasoning_beside_something():
    both = "{% if m.thinking and m.content %}{{ raise_exception('both') }}{% endif %}"
    refuses = BESIDE_CALLS.replace("{{ m.thinking }}", both + "{{ m.thinking }}")
    row = talk(user(), answer("text", reasoning="why", tool_calls=[CALL]))
    assert read(refuses, row)[2] == (OMITTED,)


def test_tools_that_the_template_does_not_write():
    assert read(PLAIN, talk(user(), answer(), tools=TOOLS))[2] == (UNREAD_TOOLS,)
    assert read("{{ tools }}" + PLAIN, talk(user(), answer(), tools=TOOLS))[2] == ()
    assert read(PLAIN, talk(user(), answer()))[2] == ()
    for_the_user = "{% if messages[-1].role == 'user' %}{{ tools }}{% endif %}" + PLAIN  # as Dolphin's
    assert read(for_the_user, talk(user(), answer(), tools=TOOLS))[2] == (UNREAD_TOOLS,)
    assert read(for_the_user, talk(user(), answer(), user(), tools=TOOLS))[2] == ()


def test_variables_of_a_row_that_the_template_does_not_read():
    row = talk(user(), answer())
    assert read(PLAIN, replace(row, template_kwargs={"date": "today"}))[2] == (UNREAD_VARIABLES,)
    assert read("{{ date }}" + PLAIN, replace(row, template_kwargs={"date": "today"}))[2] == ()


def test_names_of_speakers_that_the_template_does_not_write():
    named = talk({**user(), "name": "Ada"}, answer(name="Bo"))
    writes = PLAIN.replace("{{ m.role }}", "{{ m.name or m.role }}")
    assert read(PLAIN, named)[2] == (UNREAD_NAMES,)
    assert read(writes, named)[2] == ()
    one = writes.replace("m.name or m.role", "m.name if m.role == 'user' and m.name else m.role")
    assert read(one, named)[2] == (UNREAD_NAMES,)
    assert read(one, talk({**user(), "name": "Ada"}, answer(name="assistant")))[2] == ()
    called = talk(user(), answer("", tool_calls=[CALL]), {"role": "tool", "name": "add", "content": "2"}, answer())
    assert read(PLAIN, called)[2] == ()
    assert UnreadParts(ChatTemplate(PLAIN, {})).of_prompt(talk({**user(), "name": ""}))[1] == ()
