"""Turns are found, or the row is named: nothing is guessed."""

from __future__ import annotations

import pytest

from tests.support.chat_templates import SPECIAL_TOKENS, chat_template
from training.utils.base.errors import ThreestepError
from training.utils.data.chat.rendering import ChatTemplate
from training.utils.data.chat.spans import TurnFinder
from training.utils.data.formats.messages import BadConversation, Conversation

USER, ASSISTANT = {"role": "user", "content": "u"}, {"role": "assistant", "content": "answer"}
CHATML = chat_template("chatml")


def with_turn(written, template=CHATML):
    """ChatML that writes the assistant's turns otherwise."""
    return template.replace("message.content + '<|im_end|>' }}{% else", written + " }}{% else")


def finder(template):
    return TurnFinder(ChatTemplate(template, {}), SPECIAL_TOKENS)


def turns(template, messages, generation_prompt=False):
    read = finder(template).read(Conversation(messages, "dataset 'x', row 7"), generation_prompt)
    return [read.text[turn.begin : turn.end] for turn in read.turns]


def test_a_header_in_the_templates_own_system_prompt():
    """Two headers more than answers: the turns are found behind the prompts instead."""
    template = "<|im_start|>system\nSay <|im_start|>assistant\nhello<|im_end|>\n" + CHATML
    assert turns(template, [USER, ASSISTANT, USER, ASSISTANT]) == ["answer<|im_end|>"] * 2


def test_turns_that_a_generation_prompt_answers():
    for name in ("chatml", "inst"):
        closed = turns(chat_template(name), [USER, ASSISTANT, USER])
        assert turns(chat_template(name), [USER, ASSISTANT, USER], generation_prompt=True) == closed
        assert len(closed) == 1


def test_a_thought_opened_by_the_prompt_and_an_answer_that_opens_otherwise():
    """Of "<think>" and "<answer>" one character is common, and it is no part of the header."""
    template = CHATML.replace("<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>\n{% endif")
    opened = with_turn("'<answer>' + message.content + '<|im_end|>'", template)
    assert turns(template, [USER, ASSISTANT] * 2) == ["answer<|im_end|>"] * 2
    assert turns(opened, [USER, ASSISTANT] * 2) == ["<answer>answer<|im_end|>"] * 2
    thinking = with_turn("'<think>\n' + message.content + '<|im_end|>'", template)
    assert turns(thinking, [USER, ASSISTANT] * 2) == ["answer<|im_end|>"] * 2


def test_an_answer_without_text_behind_less_than_the_prompt():
    """As EXAONE 4's: the empty thought of the prompt stands before texts alone."""
    thought = "<think>\\n\\n</think>\\n\\n"
    template = with_turn(f"('{thought}' + message.content if message.content else '') + '<|im_end|>'")
    template = template.removesuffix("{% endif -%}") + "{{ '" + thought + "' }}{% endif -%}"
    empty = {**ASSISTANT, "content": ""}
    assert turns(template, [USER, empty, USER, ASSISTANT]) == ["<|im_end|>", "answer<|im_end|>"]
    assert turns(template, [USER, ASSISTANT, USER, empty]) == ["answer<|im_end|>", "<|im_end|>"]


def test_an_end_that_differs_in_earlier_turns():
    """As gpt-oss's: <|eot_id|> after all turns but the last."""
    template = with_turn("message.content + ('<|im_end|>' if loop.last else '<|eot_id|>')")
    assert finder(template).ends[0] == "<|im_end|>"
    assert turns(template, [USER, ASSISTANT, USER, ASSISTANT]) == ["answer<|eot_id|>", "answer<|im_end|>"]


def test_a_turn_without_end():
    template = with_turn("message.content + ('<|im_end|>' if loop.last else '')")
    read = finder(template).read(Conversation([USER, ASSISTANT, ASSISTANT], "row"))
    assert [(read.text[turn.begin : turn.end], turn.ended) for turn in read.turns] == [
        ("answer", False),
        ("answer<|im_end|>", True),
    ]


def test_a_prompt_that_ends_every_conversation():
    """As Cohere's templates with tools, which ignore add_generation_prompt; one of them adds an empty thought."""
    answer = "'<answer>' + message.content + '</answer><|im_end|>'"
    for thought in ("", "<think></think>"):
        asking = f"<|im_start|>assistant\n{thought}"
        template = with_turn(answer, CHATML.partition("{%- if add_generation")[0]) + f"{{{{ {asking!r} }}}}"
        for messages in ([USER, ASSISTANT], [USER, ASSISTANT, USER, ASSISTANT], [ASSISTANT, USER, ASSISTANT]):
            assert set(turns(template, messages)) == {"<answer>answer</answer><|im_end|>"}
        assert finder(template).prompt(Conversation([USER], "row")).endswith(asking)


def test_the_next_speakers_token_ends_earlier_turns():
    """As Metharme's, which ends a conversation where the generation prompt would be, and reads the first message."""
    template = (
        "{{ messages[0].role and '' }}{% for m in messages %}"
        "{{ ('<|end_header_id|>' if m.role == 'assistant' else '<|start_header_id|>') + m.content }}{% endfor %}"
        "{{ '<|end_header_id|>' if add_generation_prompt else '</s>' }}"
    )
    expected = ["answer<|start_header_id|>", "answer</s>"]
    assert turns(template, [USER, ASSISTANT, USER, ASSISTANT]) == expected
    assert turns(template, [ASSISTANT, USER, ASSISTANT]) == expected
    assert finder(template).ends == ("</s>", "<|start_header_id|>")


def test_a_token_that_begins_every_message_is_no_stop():
    """ChatML whose answers lost their end; in one of two, user messages write the prompt."""
    for template in (with_turn("message.content"), "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n"
                     "{{ m.content }}<|im_end|>\n<|im_start|>assistant\n{% else %}{{ m.content }}\n{% endif %}"
                     "{% endfor %}"):  # fmt: skip
        with pytest.raises(ThreestepError, match="name the token to add to the last turn with --end_of_conversation"):
            finder(template)
        named = TurnFinder(ChatTemplate(template, {}), SPECIAL_TOKENS, "<|im_end|>")
        read = named.read(Conversation([USER, ASSISTANT], "row"))
        assert read.text[read.turns[0].begin : read.turns[0].end].replace("\n", "") == "answer<|im_end|>"


def test_an_answer_that_follows_the_end_of_its_prompt():
    """As DeepSeek V3.2's behind a tool: the prompt holds an empty thought, of which the answer has the end alone."""
    thinking = "{% if add_generation_prompt %}<think></think>{% endif %}"
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}"
        "{% elif m.role == 'tool' %}<|s|>{{ m.content }}</s>\n"
        "{% elif loop.index0 and messages[loop.index0 - 1].role == 'tool' %}</think>{{ m.content }}<|im_end|>"
        "{% else %}<|im_start|>assistant\n<think></think>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n{% endif %}" + thinking
    )
    assert turns(template, [USER, ASSISTANT, {"role": "tool", "content": "5"}, ASSISTANT]) == ["answer<|im_end|>"] * 2


def test_a_call_without_the_header_of_its_prompt():
    """As Falcon 3's, which stand behind the user's text; as many headers as turns are written, one before a tool."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}"
        "{% elif m.tool_calls %}<tool_call>{{ m.tool_calls[0].arguments.x }}</tool_call><|im_end|>"
        "{% else %}<|im_start|>assistant\n{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"arguments": {"x": "y"}}]}
    said = error(template, [USER, call, {"role": "tool", "content": "5"}])
    assert "message 2: cannot tell where the assistant's turn begins" in said


def test_a_token_that_begins_a_message_never_ends_a_turn():
    """The system prompt of the template's own ends as earlier turns do, and is no reason to take that for a start."""
    template = "<|im_start|>system\nBe kind.<|eot_id|>" + with_turn(
        "message.content + ('<|im_end|>' if loop.last else '<|eot_id|>')"
    )
    assert turns(template, [USER, ASSISTANT, USER, ASSISTANT]) == ["answer<|eot_id|>", "answer<|im_end|>"]
    assert finder(template).habits.openings == {"<|im_start|>"}
    assert finder(chat_template("llama3")).habits.openings == {"<|start_header_id|>", "<|end_header_id|>"}
    assert finder(chat_template("inst")).habits.openings == {"[INST]"}


def test_tool_calls_without_texts():
    """Nothing of such a turn can be masked: it is found by its header and its end."""
    calls = [{"function": {"name": "now", "arguments": {"digits": 2}}}]
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "5"}]
    expected = '<tool_call>\n{"name": "now", "arguments": {"digits": 2}}\n</tool_call><|im_end|>'
    for marks in (False, True):
        assert turns(chat_template("merges_tools", marks), [*messages, ASSISTANT]) == [expected, "answer<|im_end|>"]


def test_an_answer_that_begins_a_conversation_without_a_header():
    """As Llama 2's, whose template reads the first message; none is there before that one."""
    template = (
        "{{ messages[0].role and '' }}{% for m in messages %}"
        "{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]{% else %} {{ m.content }} </s>{% endif %}"
        "{% endfor %}"
    )
    assert turns(template, [ASSISTANT, USER, ASSISTANT]) == ["answer </s>", " answer </s>"]


def test_an_answer_behind_tool_results_without_a_header():
    """As DeepSeek-R1's: the answer goes on where the results end, and there is one header fewer than turns."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}"
        "{% elif m.role == 'tool' %}<|s|>{{ m.content }}</s>"
        "{% elif loop.index0 and messages[loop.index0 - 1].role == 'tool' %}{{ m.content }}<|im_end|>"
        "{% else %}<|im_start|>assistant\n{{ m.tool_calls[0].name if m.tool_calls else m.content }}<|im_end|>"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n{% endif %}"
    )
    calling = {"role": "assistant", "content": None, "tool_calls": [{"name": "now", "arguments": {}}]}
    messages = [USER, calling, {"role": "tool", "content": "5"}, ASSISTANT]
    assert turns(template, messages) == ["now<|im_end|>", "answer<|im_end|>"]


def test_arguments_as_python_writes_them():
    template = CHATML.replace("message.content +", "message.content + (message.tool_calls or '') | string +")
    calls = [{"function": {"name": "f", "arguments": {"x": "it's"}}}]
    message = {"role": "assistant", "content": "a", "tool_calls": calls}
    assert turns(template, [USER, message]) == [f"a{calls}<|im_end|>"]


def test_marks_that_leave_the_end_out_get_it():
    template = chat_template("chatml", marks=True).replace(
        "{{ message.content + '<|im_end|>' }}{% endgeneration %}", "{{ message.content }}{% endgeneration %}<|im_end|>"
    )
    assert turns(template, [USER, ASSISTANT]) == ["answer<|im_end|>"]


def test_an_answer_without_text_between_marks_of_texts():
    """As MiniMax-Text-01's; where another message has no mark either, the template chose the turns."""
    marked = chat_template("chatml", marks=True).replace(
        "{{ message.content + '<|im_end|>' }}{% endgeneration %}", "{{ message.content }}{% endgeneration %}<|im_end|>"
    )
    silent = {"role": "assistant", "content": ""}
    assert turns(marked, [USER, silent, USER, ASSISTANT]) == ["<|im_end|>", "answer<|im_end|>"]
    chosen = chat_template("chatml", marks=True).replace("if message.role == 'assistant'", "if loop.last")
    assert turns(chosen, [USER, silent, USER, ASSISTANT, USER, ASSISTANT]) == ["answer<|im_end|>"]


def test_marks_that_go_past_the_end_lose_it():
    template = chat_template("chatml", marks=True).replace("'<|im_end|>' }}{% endgen", "'<|im_end|>\n' }}{% endgen")
    assert turns(template, [USER, ASSISTANT]) == ["answer<|im_end|>"]


def test_several_marks_in_a_message_and_a_thought_without():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{{ m.reasoning_content }}|"
        "{% generation %}{{ m.content }}{% endgeneration %}|"
        "{% generation %}{{ m.tool_calls[0].arguments.x if m.tool_calls }}{% endgeneration %}<|im_end|>"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    message = {**ASSISTANT, "reasoning_content": "thought", "tool_calls": [{"arguments": {"x": "y"}}]}
    assert turns(template, [USER, message]) == ["answer", "y<|im_end|>"]


def test_turns_that_the_marks_leave_out():
    only_last = "message.role == 'assistant' and loop.last"
    template = chat_template("chatml", marks=True).replace("message.role == 'assistant'", only_last)
    assert turns(template, [USER, ASSISTANT, USER, ASSISTANT]) == ["answer<|im_end|>"]


def error(template, messages):
    with pytest.raises(BadConversation) as caught:
        turns(template, messages)
    assert str(caught.value).startswith("dataset 'x', row 7")
    return str(caught.value)


def test_a_template_that_refuses():
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    assert "refuses the conversation: no system" in error(template, [{"role": "system", "content": "s"}, ASSISTANT])


def test_a_text_that_is_left_out():
    template = CHATML.replace("in messages", "in messages if message.role != 'system'")
    said = error(template, [{"role": "system", "content": "be kind"}, USER, ASSISTANT])
    assert "message 1 (system): the chat template omits its text: 'be kind'" in said


def test_a_tool_call_that_is_left_out():
    bare = {**ASSISTANT, "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}
    assert "message 2 (assistant): the chat template omits its call of 'now'" in error(CHATML, [USER, bare])
    message = {**ASSISTANT, "tool_calls": [{"name": "answer", "arguments": {"x": "it"}}]}
    assert "message 2 (assistant): the chat template omits its text: 'it'" in error(CHATML, [USER, message])


def test_a_text_that_is_changed():
    template = with_turn("message.content[:3] + '<|im_end|>'")
    said = error(template, [USER, ASSISTANT])
    assert "message 2 (assistant): the chat template changes the assistant's text: it becomes 'ans<|im_end|>'" in said


def test_a_template_that_counts():
    template = CHATML.replace("message.content +", "message.content | upper +")
    assert "depends on the texts so that the author of each part is unknown" in error(template, [USER, ASSISTANT])


def test_marks_around_somebody_else():
    template = chat_template("chatml", marks=True).replace("message.role == 'assistant'", "true")
    assert "marks contain a message of another role than the assistant" in error(template, [USER, ASSISTANT])


def test_marks_around_half_a_text():
    template = chat_template("chatml", marks=True).replace(
        "{% generation %}{{ message.content +", "{{ message.content[:2] }}{% generation %}{{ message.content[2:] +"
    )
    assert "message 2 (assistant): part of the assistant's text lies outside" in error(template, [USER, ASSISTANT])


def test_messages_written_into_each_other():
    """The first user's words come again in a marked turn, but only in longer conversations than the probe."""
    said = "message.content + (messages[0].content if messages | length > 5 else '') + '<|im_end|>'"
    marked = chat_template("chatml", marks=True)
    template = marked.replace("message.content + '<|im_end|>' }}{% end", said + " }}{% end", 1)
    assert turns(template, [USER, ASSISTANT] * 2) == ["answer<|im_end|>"] * 2
    assert "would hold text of message 1 (user): the chat template mixes the two" in error(
        template, [USER, ASSISTANT] * 3
    )


def test_a_thought_to_strip_beside_a_call_that_quotes_the_end():
    template = chat_template("merges_tools").replace(
        "{{ message.content }}{% endif %}", "{{ message.content.split('</think>')[-1] }}{% endif %}"
    )
    calls = [{"function": {"name": "f", "arguments": {"x": "<|im_end|>", "y": "z"}}}]
    message = {"role": "assistant", "content": "so</think>then", "tool_calls": calls}
    call = '<tool_call>\n{"name": "f", "arguments": {"x": "<|im_end|>", "y": "z"}}\n</tool_call><|im_end|>'
    assert turns(template, [USER, message]) == ["then\n" + call]


def test_a_beginning_that_cannot_be_told():
    """Two assistants without a header of the second's: the prompt behind the first is nowhere in the whole."""
    template = CHATML.replace(
        "<|im_start|>{{ message.role }}\n",
        "{% if loop.first or message.role != 'assistant' or messages[loop.index0 - 1].role != 'assistant' %}"
        "<|im_start|>{{ message.role }}\n{% endif %}",
    )
    said = error(template, [USER, ASSISTANT, ASSISTANT])
    assert "message 3: cannot tell where the assistant's turn begins" in said
