"""Turns are found, or the row is named: nothing is guessed."""

from __future__ import annotations

import pytest

from tests.support.chat_templates import SPECIAL_TOKENS, chat_template
from tests.support.said import assistant, user
from training.utils.base.errors import ThreestepError
from training.utils.data.chat.rendering import ChatTemplate
from training.utils.data.chat.spans import TurnFinder
from training.utils.data.formats.messages import BadConversation, Conversation

USER, ASSISTANT = user("u"), assistant("answer")
CHATML, MARKED = chat_template("chatml"), chat_template("chatml", marks=True)


def with_turn(written, template=CHATML):
    """ChatML that writes the assistant's turns otherwise."""
    return template.replace("message.content + '<|im_end|>' }}{% else", written + " }}{% else")


def finder(template):
    return TurnFinder(ChatTemplate(template, {}), SPECIAL_TOKENS)


def turns(template, messages, generation_prompt=False):
    read = finder(template).read(Conversation(messages, "dataset 'x', row 7"), generation_prompt)
    return [read.text[turn.begin : turn.end] for turn in read.turns]


def error(template, messages):
    with pytest.raises(BadConversation) as caught:
        turns(template, messages)
    assert str(caught.value).startswith("dataset 'x', row 7")
    return str(caught.value)


ANSWER, TOOL = "answer<|im_end|>", {"role": "tool", "content": "5"}
SILENT = {**ASSISTANT, "content": ""}
TWICE = [USER, ASSISTANT, USER, ASSISTANT]
OTHER_ENDS = "message.content + ('<|im_end|>' if loop.last else '<|eot_id|>')"
OPENED = CHATML.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif")
EMPTY_THOUGHT = "<think>\\n\\n</think>\\n\\n"
BEFORE_TEXTS = with_turn(f"('{EMPTY_THOUGHT}' + message.content if message.content else '') + '<|im_end|>'")
BEFORE_TEXTS = BEFORE_TEXTS.removesuffix("{% endif -%}") + "{{ '" + EMPTY_THOUGHT + "' }}{% endif -%}"
BEHIND_TOOL = (  # the prompt holds an empty thought, of which the answer has the end alone
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}"
    "{% elif m.role == 'tool' %}<|s|>{{ m.content }}</s>\n"
    "{% elif loop.index0 and messages[loop.index0 - 1].role == 'tool' %}</think>{{ m.content }}<|im_end|>"
    "{% else %}<|im_start|>assistant\n<think></think>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n{% endif %}"
    "{% if add_generation_prompt %}<think></think>{% endif %}"
)
NO_FIRST_HEADER = (  # reads the first message; none is there before that one
    "{{ messages[0].role and '' }}{% for m in messages %}"
    "{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} </s>{% endif %}"
    "{% endfor %}"
)
GOES_ON = (  # the answer goes on where the results end, and there is one header fewer than turns
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}"
    "{% elif m.role == 'tool' %}<|s|>{{ m.content }}</s>"
    "{% elif loop.index0 and messages[loop.index0 - 1].role == 'tool' %}{{ m.content }}<|im_end|>"
    "{% else %}<|im_start|>assistant\n{{ m.tool_calls[0].name if m.tool_calls else m.content }}<|im_end|>"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n{% endif %}"
)
CALLING = {"role": "assistant", "content": None, "tool_calls": [{"name": "now", "arguments": {}}]}
PRINTS = CHATML.replace("message.content +", "message.content + (message.tool_calls or '') | string +")
ITS = [{"function": {"name": "f", "arguments": {"x": "it's"}}}]
MARKS_TEXT = MARKED.replace(
    "{{ message.content + '<|im_end|>' }}{% endgeneration %}", "{{ message.content }}{% endgeneration %}<|im_end|>"
)
MARKS_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{{ m.reasoning_content }}|"
    "{% generation %}{{ m.content }}{% endgeneration %}|"
    "{% generation %}{{ m.tool_calls[0].arguments.x if m.tool_calls }}{% endgeneration %}<|im_end|>"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
PARTS = {**ASSISTANT, "reasoning_content": "thought", "tool_calls": [{"arguments": {"x": "y"}}]}
DIGITS = [{"function": {"name": "now", "arguments": {"digits": 2}}}]
CALLED = [USER, {**SILENT, "tool_calls": DIGITS}, TOOL, ASSISTANT]
WRITTEN_CALL = '<tool_call>\n{"name": "now", "arguments": {"digits": 2}}\n</tool_call><|im_end|>'
STRIPS = chat_template("merges_tools").replace(
    "{{ message.content }}{% endif %}", "{{ message.content.split('</think>')[-1] }}{% endif %}"
)
QUOTING = [{"function": {"name": "f", "arguments": {"x": "<|im_end|>", "y": "z"}}}]
QUOTED = '<tool_call>\n{"name": "f", "arguments": {"x": "<|im_end|>", "y": "z"}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        pytest.param("<|im_start|>system\nSay <|im_start|>assistant\nhello<|im_end|>\n" + CHATML, TWICE, [ANSWER] * 2,
                     id="a header in the template's own system prompt: the turns are found behind the prompts"),
        pytest.param(OPENED, TWICE, [ANSWER] * 2, id="a thought opened by the prompt"),
        pytest.param(with_turn("'<answer>' + message.content + '<|im_end|>'", OPENED), TWICE, [f"<answer>{ANSWER}"] * 2,
                     id="of <think> and <answer> one character is common, and it is no part of the header"),
        pytest.param(with_turn("'<think>\n' + message.content + '<|im_end|>'", OPENED), TWICE, [ANSWER] * 2,
                     id="a thought opened by the prompt, and in answers"),
        pytest.param(BEFORE_TEXTS, [USER, SILENT, USER, ASSISTANT], ["<|im_end|>", ANSWER],
                     id="EXAONE 4: the prompt's empty thought stands before texts alone"),
        pytest.param(BEFORE_TEXTS, [USER, ASSISTANT, USER, SILENT], [ANSWER, "<|im_end|>"], id="EXAONE 4, the last"),
        pytest.param(with_turn(OTHER_ENDS), TWICE, ["answer<|eot_id|>", ANSWER], id="gpt-oss: other ends"),
        pytest.param("<|im_start|>system\nBe kind.<|eot_id|>" + with_turn(OTHER_ENDS), TWICE,
                     ["answer<|eot_id|>", ANSWER], id="a system prompt that ends as turns do makes that no start"),
        pytest.param(BEHIND_TOOL, [USER, ASSISTANT, TOOL, ASSISTANT], [ANSWER] * 2, id="DeepSeek V3.2 behind a tool"),
        pytest.param(NO_FIRST_HEADER, [ASSISTANT, USER, ASSISTANT], ["answer </s>", " answer </s>"], id="Llama 2"),
        pytest.param(GOES_ON, [USER, CALLING, TOOL, ASSISTANT], ["now<|im_end|>", ANSWER], id="DeepSeek R1"),
        pytest.param(PRINTS, [USER, {**ASSISTANT, "content": "a", "tool_calls": ITS}], [f"a{ITS}<|im_end|>"],
                     id="arguments as Python writes them"),
        # Nothing of such a turn can be masked: it is found by its header and its end.
        pytest.param(chat_template("merges_tools"), CALLED, [WRITTEN_CALL, ANSWER], id="calls without texts"),
        pytest.param(chat_template("merges_tools", True), CALLED, [WRITTEN_CALL, ANSWER], id="the same, marked"),
        pytest.param(STRIPS, [USER, {**ASSISTANT, "content": "so</think>then", "tool_calls": QUOTING}],
                     ["then\n" + QUOTED], id="a thought to strip beside a call that quotes the end"),
        pytest.param(MARKS_TEXT, [USER, ASSISTANT], [ANSWER], id="marks that leave the end out get it"),
        pytest.param(MARKS_TEXT, [USER, SILENT, USER, ASSISTANT], ["<|im_end|>", ANSWER], id="MiniMax-Text-01"),
        pytest.param(MARKED.replace("if message.role == 'assistant'", "if loop.last"),
                     [USER, SILENT, *TWICE], [ANSWER], id="where another message has no mark either, these are chosen"),
        pytest.param(MARKED.replace("'<|im_end|>' }}{% endgen", "'<|im_end|>\n' }}{% endgen"), [USER, ASSISTANT],
                     [ANSWER], id="marks that go past the end lose it"),
        pytest.param(MARKS_PARTS, [USER, PARTS], ["answer", "y<|im_end|>"], id="several marks and a thought without"),
        pytest.param(MARKED.replace("message.role == 'assistant'", "message.role == 'assistant' and loop.last"), TWICE,
                     [ANSWER], id="turns that the marks leave out"),
    ],
)  # fmt: skip
def test_what_the_assistant_writes(template, messages, expected):
    assert turns(template, messages) == expected


def test_turns_that_a_generation_prompt_answers():
    for name in ("chatml", "inst"):
        closed = turns(chat_template(name), [USER, ASSISTANT, USER])
        assert turns(chat_template(name), [USER, ASSISTANT, USER], generation_prompt=True) == closed
        assert len(closed) == 1


def test_a_turn_without_end():
    template = with_turn("message.content + ('<|im_end|>' if loop.last else '')")
    read = finder(template).read(Conversation([USER, ASSISTANT, ASSISTANT], "row"))
    found = [(read.text[turn.begin : turn.end], turn.ended) for turn in read.turns]
    assert found == [("answer", False), (ANSWER, True)]


def test_a_prompt_that_ends_every_conversation():
    """As Cohere's templates with tools, which ignore add_generation_prompt; one of them adds an empty thought."""
    answer = "'<answer>' + message.content + '</answer><|im_end|>'"
    for thought in ("", "<think></think>"):
        asking = f"<|im_start|>assistant\n{thought}"
        template = with_turn(answer, CHATML.partition("{%- if add_generation")[0]) + f"{{{{ {asking!r} }}}}"
        for messages in ([USER, ASSISTANT], TWICE, [ASSISTANT, USER, ASSISTANT]):
            assert set(turns(template, messages)) == {"<answer>answer</answer><|im_end|>"}
        assert finder(template).prompt(Conversation([USER], "row")).endswith(asking)


def test_the_next_speakers_token_ends_earlier_turns():
    """As Metharme's, which ends a conversation where the generation prompt would be, and reads the first message."""
    template = (
        "{{ messages[0].role and '' }}{% for m in messages %}"
        "{{ ('<|end_header_id|>' if m.role == 'assistant' else '<|start_header_id|>') + m.content }}{% endfor %}"
        "{{ '<|end_header_id|>' if add_generation_prompt else '</s>' }}"
    )
    for messages in (TWICE, [ASSISTANT, USER, ASSISTANT]):
        assert turns(template, messages) == ["answer<|start_header_id|>", "answer</s>"]
    assert finder(template).ends == ("</s>", "<|start_header_id|>")
    assert finder(with_turn(OTHER_ENDS)).ends[0] == "<|im_end|>"


def test_a_token_that_begins_every_message_is_no_stop():
    """ChatML whose answers lost their end; in one of two, user messages write the prompt."""
    for template in (with_turn("message.content"), "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n"
                     "{{ m.content }}<|im_end|>\n<|im_start|>assistant\n{% else %}{{ m.content }}\n{% endif %}"
                     "{% endfor %}"):  # fmt: skip
        with pytest.raises(ThreestepError, match="name the token to add to the last turn with --end_of_conversation"):
            finder(template)
        named = TurnFinder(ChatTemplate(template, {}), SPECIAL_TOKENS, "<|im_end|>")
        read = named.read(Conversation([USER, ASSISTANT], "row"))
        assert read.text[read.turns[0].begin : read.turns[0].end].replace("\n", "") == ANSWER
    own = "<|im_start|>system\nBe kind.<|eot_id|>" + with_turn(OTHER_ENDS)
    assert finder(own).habits.openings == {"<|im_start|>"}
    assert finder(chat_template("llama3")).habits.openings == {"<|start_header_id|>", "<|end_header_id|>"}
    assert finder(chat_template("inst")).habits.openings == {"[INST]"}


NO_CALL_HEADER = (  # behind the user's text; as many headers as turns are written, one before a tool
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}"
    "{% elif m.tool_calls %}<tool_call>{{ m.tool_calls[0].arguments.x }}</tool_call><|im_end|>"
    "{% else %}<|im_start|>assistant\n{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONE_HEADER = CHATML.replace(
    "<|im_start|>{{ message.role }}\n",
    "{% if loop.first or message.role != 'assistant' or messages[loop.index0 - 1].role != 'assistant' %}"
    "<|im_start|>{{ message.role }}\n{% endif %}",
)
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
SYSTEM = {"role": "system", "content": "be kind"}
HALF = MARKED.replace(
    "{% generation %}{{ message.content +", "{{ message.content[:2] }}{% generation %}{{ message.content[2:] +"
)


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        pytest.param(NO_CALL_HEADER, [USER, {**SILENT, "tool_calls": [{"arguments": {"x": "y"}}]}, TOOL],
                     "message 2: cannot tell where the assistant's turn begins", id="Falcon 3: a call without header"),
        pytest.param(ONE_HEADER, [USER, ASSISTANT, ASSISTANT],
                     "message 3: cannot tell where the assistant's turn begins", id="the second has no header"),
        pytest.param(REFUSES, [SYSTEM, ASSISTANT], "refuses the conversation: no system", id="a refusal"),
        pytest.param(CHATML.replace("in messages", "in messages if message.role != 'system'"),
                     [SYSTEM, USER, ASSISTANT],
                     "message 1 (system): the chat template omits its text: 'be kind'", id="a text left out"),
        pytest.param(CHATML, [USER, {**ASSISTANT, "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}],
                     "message 2 (assistant): the chat template omits its call to 'now'", id="a call left out"),
        pytest.param(CHATML, [USER, {**ASSISTANT, "tool_calls": [{"name": "answer", "arguments": {"x": "it"}}]}],
                     "message 2 (assistant): the chat template omits its text: 'it'", id="an argument left out"),
        pytest.param(with_turn("message.content[:3] + '<|im_end|>'"), [USER, ASSISTANT],
                     "message 2 (assistant): the chat template changes the assistant's text from ",
                     id="a text changed"),
        pytest.param(CHATML.replace("message.content +", "message.content | upper +"), [USER, ASSISTANT],
                     "depends on the texts, so the author of each part is unclear", id="a text that is counted"),
        pytest.param(MARKED.replace("message.role == 'assistant'", "true"), [USER, ASSISTANT],
                     "marks contain a message from a role other than the assistant", id="marks around somebody else"),
        pytest.param(HALF, [USER, ASSISTANT],
                     "message 2 (assistant): part of the assistant's text lies outside", id="marks around half a text"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_named(template, messages, said):
    assert said in error(template, messages)


def test_messages_written_into_each_other():
    """The first user's words come again in a marked turn, but only in longer conversations than the probe."""
    said = "message.content + (messages[0].content if messages | length > 5 else '') + '<|im_end|>'"
    template = MARKED.replace("message.content + '<|im_end|>' }}{% end", said + " }}{% end", 1)
    assert turns(template, TWICE) == [ANSWER] * 2
    mixed = error(template, [USER, ASSISTANT] * 3)
    assert "would include text of message 1 (user), because the chat template mixes the two" in mixed
