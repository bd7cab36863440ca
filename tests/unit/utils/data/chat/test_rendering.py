"""Masked texts show what a template wrote itself."""

from __future__ import annotations

import threading
import time

import pytest

from tests.support.chat_templates import chat_template
from tests.support.said import user
from training.utils.base.errors import ThreestepError
from training.utils.data.chat import rendering
from training.utils.data.chat.rendering import ChatTemplate, TemplateRefused, mask_messages
from training.utils.data.formats.messages import BadConversation

TALK = [{"role": "user", "content": 'a "b"\n'}, {"role": "assistant", "content": "b", "reasoning_content": "c"}]


def test_blanks_and_what_json_escapes_stay():
    masks = mask_messages(TALK, "row")
    assert masks.messages[0]["content"] == '\U000f0000 "\U000f0001"\n'
    assert masks.messages[1] == {
        "role": "assistant",
        "content": "\U000f0002",  # another b than the user's
        "reasoning_content": "\U000f0003",
    }
    assert [(text.message, text.kind, text.masked) for text in masks.texts] == [
        (0, "content", True), (1, "content", True), (1, "reasoning", True)
    ]  # fmt: skip
    assert not mask_messages([user(" \n")], "row").texts[0].masked


def test_literals_that_are_kept():
    (message,) = mask_messages([user("x</think>y")], "row", ["</think>"]).messages
    assert message["content"] == "\U000f0008</think>\U000f0009"  # of / < > h i k n t x y, x and y


def test_tool_arguments():
    call = {"function": {"name": "add", "arguments": {"x": ["a", 1], "y": "b"}}, "id": "c"}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    (masked,) = mask_messages([message], "row").messages
    function = {"name": "add", "arguments": {"x": ["\U000f0000", 1], "y": "\U000f0001"}}
    assert masked["tool_calls"] == [{"function": function, "id": "c"}]
    assert mask_messages([message], "row", arguments=False).messages == [message]


def test_provenance():
    masks = mask_messages(TALK, "row")
    positions_M, texts_M, messages_M = masks.provenance('<\U000f0002>\U000f0000 "', '<b>a "')
    assert positions_M.tolist() == [1, 3]
    assert texts_M.tolist() == [1, 0] and messages_M.tolist() == [1, 0]
    assert masks.provenance("<\U000f0002>", "<a>") is None
    assert masks.provenance("<\U000f0002>", "<b> ") is None
    assert masks.provenance("\U000f0009", "\U000f0009") is None  # no mask of these messages
    assert len(mask_messages([], "row").provenance("x", "x")[0]) == 0


def test_too_many_different_characters():
    text = "".join(map(chr, range(0x20000, 0x2A000)))
    with pytest.raises(BadConversation, match="row 5: the conversation is too long to mask .over "):
        mask_messages([{"role": "user", "content": text}] * 5, "row 5")


def test_what_a_template_asks_for():
    template = ChatTemplate(
        "{% for m in messages %}{% if m['role'] == 'user' and m.role in ['tool'] and 'aa' in m.content %}"
        "{{ m.content.split('bb')[0] | replace('cc', 'dd') }}{{ '<|im_end|>' + m.content.strip() }}"
        "{% elif m.content == 'ee' %}{% generation %}{% break %}{% endgeneration %}{% endif %}{% endfor %}",
        {},
    )
    assert template.literals == {"aa", "bb", "cc", "dd", "ee"}
    assert template.has_marks


def test_rendering_is_transformers_own():
    template = ChatTemplate(chat_template("chatml", marks=True), {})
    rendered = template.render(TALK, marks=True)
    begin, end = rendered.marks[0]
    assert len(rendered.marks) == 1 and rendered.text[begin:end] == "b<|im_end|>"
    assert template.render(TALK).text == rendered.text and template.render(TALK).marks == []
    with_prompt = template.render(TALK, generation_prompt=True).text
    assert with_prompt == rendered.text + "<|im_start|>assistant\n"
    assert ChatTemplate("{{ bos_token }}{{ tools[0].x }}", {"bos_token": "<s>"}).render([], [{"x": 1}]).text == "<s>1"


def test_a_template_that_raises():
    with pytest.raises(TemplateRefused, match="no such role"):
        ChatTemplate("{{ raise_exception('no such role') }}", {}).render(TALK)
    with pytest.raises(TemplateRefused, match="concatenate"):
        ChatTemplate("{{ 'a' + none }}", {}).render(TALK)
    with pytest.raises(ThreestepError, match="the chat template is not valid Jinja: line 2"):
        ChatTemplate("\n{% if %}", {})


def test_reasoning_in_a_part_of_the_content_is_masked_as_reasoning():
    """Mistral's: a thought may quote a header."""
    parts = [{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "4"}]
    masked = mask_messages([{"role": "assistant", "content": parts}], "row")
    assert {(text.kind, text.text, text.masked) for text in masked.texts} == {
        ("reasoning", "why", True), ("content", "4", True),
    }  # fmt: skip
    assert [part["type"] for part in masked.messages[0]["content"]] == ["thinking", "text"]


GOOD = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LONG_ROW = [user("a very particular question")]


# Templates that loop or multiply end in a sentence: at their first renderings, and at a row that they do so for.


@pytest.fixture
def little(monkeypatch):
    monkeypatch.setattr(rendering, "TRIAL_SECONDS", 1)
    monkeypatch.setattr(rendering, "MOST_BYTES", 256 << 20)
    monkeypatch.setattr(rendering, "MOST_CHARACTERS", 1 << 20)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (LOOPS, "takes more than 1 seconds for three short conversations"),
        ("{% set x = namespace(n=2) %}{% for a in range(99) %}{% set x.n = x.n ** 9 %}{% endfor %}", "takes more than"),
        ("{{ 'a' * 10**10 }}", "takes more than 256 MiB of memory"),
        ("{{ 'a' * 10**12 }}", "takes more than 256 MiB of memory"),
        ("{{ messages[0].content * 100000000 }}", "takes more than 256 MiB of memory"),
        (GOOD + "{{ '%1000000000d' % 1 }}", "takes more than 256 MiB of memory"),
        (GOOD + "{{ 'a' * 2**20 }}", "produces more than 1,048,576 characters"),
        ("{% if tools %}" + LOOPS + "{% endif %}", "takes more than 1 seconds"),
        ("{% if add_generation_prompt %}" + LOOPS + "{% endif %}", "takes more than 1 seconds"),
        ("{% macro f(x) %}{{ f(x) }}{{ f(x) }}{% endmacro %}" + "{% for a in range(90000) %}{{ messages|tojson }}" * 3
         + "{% endfor %}" * 3, "takes more than"),
    ],
)  # fmt: skip
def test_a_template_without_bounds_is_refused(little, text, sentence):
    began = time.monotonic()
    with pytest.raises(ThreestepError, match=f"the chat template .*{sentence}"):
        ChatTemplate(text, {})
    assert time.monotonic() - began < 20


def test_a_good_template_is_tried_once_and_one_that_refuses_is_no_matter_here(little, monkeypatch):
    tried = []
    monkeypatch.setattr("training.utils.data.chat.rendering.check_first_renderings", tried.append)
    for _ in range(3):
        ChatTemplate(GOOD + "{# once #}", {})
    assert len(tried) == 1
    monkeypatch.undo()
    ChatTemplate("{{ raise_exception('no') }}{# refuses #}", {})
    assert ChatTemplate(GOOD, {}).render([user("Hi")]).text == "user: Hi\n"


def test_a_row_for_which_it_loops_ends_in_a_sentence_in_any_thread(little, monkeypatch):
    template = ChatTemplate(GOOD + "{% if 'particular' in messages[0].content %}" + LOOPS + "{% endif %}", {})
    monkeypatch.setattr(rendering, "RENDERING_SECONDS", 0.4)
    monkeypatch.setattr(rendering, "_watched_process", 0)  # a thread that looks so often
    problems = []

    def render():
        try:
            template.render(LONG_ROW)
        except ThreestepError as problem:
            problems.append(str(problem))

    threads = [threading.Thread(target=render) for _ in range(2)]
    for thread in threads:
        thread.start()
    render()
    for thread in threads:
        thread.join(20)
    expected = "the chat template takes more than 0.4 seconds for a conversation of 1 messages; fix its loops"
    assert len(problems) == 3 and all(problem.startswith(expected) for problem in problems)
    assert rendering._deadlines == {}
    assert template.render([user("Hi")]).text == "user: Hi\n"


def test_a_template_that_calls_itself_for_ever_is_a_refusal(little, monkeypatch):
    # Jinja rewrites a traceback of a thousand frames, which takes half a second of an idle processor in the trial.
    monkeypatch.setattr(rendering, "TRIAL_SECONDS", 10)
    template = ChatTemplate("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", {})
    with pytest.raises(TemplateRefused, match="recursion"):
        template.render([user("Hi")])


def test_a_row_for_which_it_writes_too_much_is_a_sentence(little, monkeypatch):
    template = ChatTemplate(GOOD, {})
    monkeypatch.setattr(rendering, "MOST_CHARACTERS", 100)
    with pytest.raises(ThreestepError, match="produces 207 characters for a conversation of 1 messages, more than 100"):
        template.render([{"role": "user", "content": "a" * 200}])
