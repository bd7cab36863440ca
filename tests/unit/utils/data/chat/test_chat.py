"""Loss-carrying tokens decode to what the assistant wrote with its end-of-turn, all others carry none.

What a template writes, and which of it the assistant writes, is said a second time here in plain Python, one
function a template; hypothesis brings the conversations.
"""

from __future__ import annotations

import functools
import json
from itertools import groupby
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.support.chat_templates import chat_template, chat_tokenizer
from tests.support.said import assistant, user
from tests.unit.utils.data.rows.test_tokenize import with_a_space_of_its_own
from training.utils.base.errors import ThreestepError
from training.utils.data.chat.chat import ChatTokenizer, template_text
from training.utils.data.chat.style import adopt_style, conversation_end
from training.utils.data.formats.messages import Conversation, checked_messages
from training.utils.data.rows.arguments import ChatArguments

NAMES = ("chatml", "llama3", "strips_thinking", "merges_tools")

# What a template looks for or writes, quoted by people; blanks; what takes several bytes or JSON escapes.
FRAGMENTS = [
    " ", "\n", "\n\n", "a", "2 + 3", "user", "assistant", "<|im_end|>", "<|im_start|>assistant\n", "<|eot_id|>",
    "<|start_header_id|>assistant<|end_header_id|>\n\n", "<think>", "</think>", "<think>\n\n</think>\n\n",
    "<tool_call>\n", "<tool_response>", "{% generation %}", "{{ x }}", '"', "\\", "\t", "\u00e9", "\u4f60\u597d",
    "\U0001f642", "\u2028", "\U000f0000", "\U000f0001", "<|endoftext|>",
]  # fmt: skip
TEXTS = st.one_of(st.lists(st.sampled_from(FRAGMENTS), max_size=5).map("".join), st.text(max_size=6))


def message(role, **more):
    return st.fixed_dictionaries({"role": st.just(role), "content": TEXTS, **more})


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


ARGUMENTS = st.dictionaries(st.sampled_from(["x", "city"]), st.one_of(TEXTS, st.integers(), st.none(), st.lists(TEXTS)))
CALLS = st.lists(st.builds(call, st.sampled_from(["add", "find"]), ARGUMENTS), max_size=2)
MESSAGES = {
    "chatml": st.one_of(message("user"), message("assistant"), message("system"), message("tool")),
    "llama3": st.one_of(message("user"), message("assistant"), message("tool")),
    "strips_thinking": st.one_of(
        message("user"), message("system"), message("assistant"), message("assistant", reasoning_content=TEXTS)
    ),
    "merges_tools": st.one_of(
        message("user"), message("tool"), message("assistant"), message("assistant", tool_calls=CALLS)
    ),
}

# What each template writes, as (text, is it the assistant's).


def chatml(messages, tools=None):
    for each in messages:
        yield f"<|im_start|>{each['role']}\n", False
        yield each["content"] + "<|im_end|>", each["role"] == "assistant"
        yield "\n", False


def llama3(messages, tools=None):
    yield "<|begin_of_text|>", False
    for each in messages:
        yield f"<|start_header_id|>{each['role']}<|end_header_id|>\n\n", False
        yield each["content"].strip() + "<|eot_id|>", each["role"] == "assistant"


def strips_thinking(messages, tools=None):
    last_user = max((place for place, each in enumerate(messages) if each["role"] == "user"), default=-1)
    for place, each in enumerate(messages):
        yield f"<|im_start|>{each['role']}\n", False
        if each["role"] != "assistant":
            yield each["content"] + "<|im_end|>\n", False
            continue
        content, thought = each["content"], each.get("reasoning_content", "")
        if not thought and "</think>" in content:
            thought = content.split("</think>")[0].split("<think>")[-1].strip("\n")
            content = content.split("</think>")[-1].lstrip("\n")
        if place > last_user and (place == len(messages) - 1 or thought):
            content = f"<think>\n{thought}\n</think>\n\n{content}"
        yield content + "<|im_end|>", True
        yield "\n", False


def merges_tools(messages, tools=None):
    if tools:
        listed = "".join(json.dumps(tool) + "\n" for tool in tools)
        yield f"<|im_start|>system\nTools:\n{listed}<|im_end|>\n", False
    for is_tool, run in groupby(messages, lambda each: each["role"] == "tool"):
        run = list(run)
        if is_tool:
            results = "".join(f"\n<tool_response>\n{each['content']}\n</tool_response>" for each in run)
            yield f"<|im_start|>user{results}<|im_end|>\n", False
            continue
        for each in run:
            yield f"<|im_start|>{each['role']}\n", False
            if each["role"] != "assistant":
                yield each["content"] + "<|im_end|>\n", False
                continue
            calls = [
                f'<tool_call>\n{{"name": "{one["function"]["name"]}", "arguments": '
                f"{json.dumps(one['function']['arguments'], ensure_ascii=False)}}}\n</tool_call>"
                for one in each.get("tool_calls", [])
            ]
            yield "\n".join([each["content"]] * bool(each["content"]) + calls) + "<|im_end|>", True
            yield "\n", False


WRITERS = {"chatml": chatml, "llama3": llama3, "strips_thinking": strips_thinking, "merges_tools": merges_tools}


def made(template, tokenizer=None, **flags) -> ChatTokenizer:
    tokenizer = chat_tokenizer(template) if tokenizer is None else tokenizer
    return ChatTokenizer(ChatArguments(prompt_style="chat_template", **flags), tokenizer)


@functools.cache
def chat(name: str, marks: bool = False, **flags) -> ChatTokenizer:
    return made(chat_template(name, marks), **flags)


def runs(segments) -> list[tuple[str, bool]]:
    """Neighbours of one kind as one; empty texts left out."""
    kept = [(text, kind) for text, kind in segments if text]
    return [("".join(text for text, _ in run), kind) for kind, run in groupby(kept, lambda one: one[1])]


class Encoded(NamedTuple):
    ids: list[int]
    loss: list[bool]


def encoded(chat: ChatTokenizer, messages, tools=None, train_turns="all", **kwargs) -> Encoded | None:
    conversation = Conversation(checked_messages(messages, "row"), "row", tools, kwargs)
    found = chat.sentence(conversation, train_turns)
    if found is None:
        return None
    pieces, _ = found
    (row,) = chat.encode([pieces], [len(pieces)])
    loss = [piece.carries_loss for piece, ids in zip(pieces, row.parts, strict=True) for _ in ids]
    return Encoded([token for ids in row.parts for token in ids], loss)


def whole_prompt(chat: ChatTokenizer, conversation: Conversation) -> list[int]:
    pieces = chat.prompt(conversation)
    (row,) = chat.encode([pieces], [len(pieces)])
    return [token for ids in row.parts for token in ids]


def learnt(chat: ChatTokenizer, messages, **given) -> list[str]:
    """The texts that carry loss."""
    return [text for text, loss in decoded_runs(chat, encoded(chat, messages, **given)) if loss]


def decoded_runs(chat: ChatTokenizer, row: Encoded) -> list[tuple[str, bool]]:
    """What the row says, cut where loss begins or ends."""
    cut = [list(run) for _, run in groupby(zip(row.ids, row.loss, strict=True), lambda one: one[1])]
    return [(chat.decode([[token for token, _ in run]])[0], run[0][1]) for run in cut]


@pytest.mark.parametrize("marks", [False, True], ids=["no marks", "marks"])
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_loss_is_what_the_assistant_writes(name, marks, data):
    messages = data.draw(st.lists(MESSAGES[name], min_size=1, max_size=6))
    tools = [{"name": "add"}] if name == "merges_tools" and data.draw(st.booleans()) else None
    row = encoded(chat(name, marks), messages, tools)
    written = list(WRITERS[name](messages, tools))
    if all(each["role"] != "assistant" for each in messages):
        assert row is None
        return
    tokenizer, text = chat(name, marks)._tokenizer, "".join(each for each, _ in written)
    whole = tokenizer(text, return_offsets_mapping=True)
    assert row.ids == whole["input_ids"]
    ours = [loss for each, loss in written for _ in each]
    assert row.loss == [any(ours[begin:end]) for begin, end in whole["offset_mapping"]]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_prompt_ids_are_a_prefix_of_every_sentence(name, data):
    """Phases 2 and 3: the generation prompt's ids do not depend on the answer, and the answer ends its turn."""
    own = chat(name)
    messages = [*data.draw(st.lists(MESSAGES[name], max_size=3)), data.draw(message("user"))]
    answers = [text + "." for text in data.draw(st.tuples(TEXTS, TEXTS))]
    prompt = Conversation(checked_messages(messages, "row"), "row")
    pieces, responses = own.responses(prompt, [{"role": "assistant", "content": text} for text in answers])
    text = "".join(piece.text for piece in pieces)
    tokenizer = own._tokenizer
    assert text == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = own.encode([[*pieces, *responses]], [len(pieces)])[0].parts
    for answer, response, response_ids in zip(answers, responses, ids[len(pieces) :], strict=True):
        whole = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": answer}], tokenize=False)
        assert whole.startswith(text + response.text) and whole[len(text + response.text) :].strip() == ""
        assert response_ids[-1] == own.texts.end_id
        prompt_ids = [token for part in ids[: len(pieces)] for token in part]
        assert prompt_ids + response_ids == tokenizer(text + response.text, add_special_tokens=False)["input_ids"]


def test_a_token_across_the_beginning_of_a_turn_is_learnt():
    """Behind "assistant" and a line break, an answer beginning with two: two of the three are one token, or all."""
    own = chat("chatml")
    messages = [user(), {"role": "assistant", "content": "\n\nb"}]
    (whole,) = own.encode([own.sentence(Conversation(messages, "row"), "all")[0]], [3])
    assert whole.crosses
    row = encoded(own, messages)
    assert row.ids == own._tokenizer.apply_chat_template(messages)["input_ids"]
    assert decoded_runs(own, row)[1] == ("\n\n\nb<|im_end|>", True)


def test_content_in_parts():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    own = made(template)
    parts = [{"type": "text", "text": "one, "}, {"type": "text", "text": "two"}]
    row = encoded(own, [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}])
    assert decoded_runs(own, row)[-1] == ("one, two<|im_end|>", True)


def test_a_template_without_headers():
    """Llama 2's and Mistral's way: the turn begins where the prompt's closing mark ends."""
    for marks in (False, True):
        own = chat("inst", marks)
        messages = [{"role": "user", "content": "a [/INST] "}, {"role": "assistant", "content": " b </s> c "}] * 2
        segments = [("<s>", False), *[("[INST] a [/INST] [/INST]", False), (" b </s> c </s>", True)] * 2]
        assert decoded_runs(own, encoded(own, messages)) == runs(segments)
        assert own.end_token == "</s>"


def test_a_template_that_ignores_the_generation_prompt():
    template = chat_template("chatml").split("{%- if add_generation_prompt")[0]
    own = made(template)
    messages = [user(), assistant()]
    assert decoded_runs(own, encoded(own, messages * 2)) == runs(chatml(messages * 2))
    prompt = own.prompt(Conversation(messages * 2 + messages[:1], "row"))
    assert prompt[-1].text.endswith("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")


def test_a_thought_that_the_generation_prompt_opens():
    """enable_thinking off: the empty thought is the prompt's where the template writes it, and no part of the turn."""
    thoughtless = chat("strips_thinking", chat_template_kwargs='{"enable_thinking": false}')
    thinking, messages = chat("strips_thinking"), [user(), assistant()] * 2
    assert learnt(thoughtless, messages) == ["b<|im_end|>"] * 2
    assert learnt(thinking, messages) == ["b<|im_end|>", "<think>\n\n</think>\n\nb<|im_end|>"]
    assert learnt(thinking, messages, enable_thinking=False) == ["b<|im_end|>"] * 2  # by the row


def test_a_response_that_does_not_follow_its_prompt():
    """The prompt ends with an empty thought, the whole conversation holds another one."""
    own = chat("strips_thinking", chat_template_kwargs='{"enable_thinking": false}')
    prompt = Conversation([user()], "row")
    plain, thoughtful = assistant(), {"role": "assistant", "content": "<think>c</think>b"}
    assert own.responses(prompt, [plain, plain]) is not None
    assert own.responses(prompt, [plain, thoughtful]) is None


@pytest.mark.parametrize("marks", [False, True])
@pytest.mark.parametrize("turns", [1, 2])
def test_an_empty_thought_of_the_generation_prompt_alone(marks, turns):
    """The row's prompt has the same ids when it is learnt, compared and asked; earlier turns are as the template writes
    them."""
    own = chat("empty_thought", marks, chat_template_kwargs='{"enable_thinking": false}')
    messages = [user(), assistant(" b\n")] * turns
    asked = Conversation(messages[:-1], "row")
    prompt = whole_prompt(own, asked)
    assert own.decode([prompt])[0].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    row = encoded(own, messages)
    assert row.ids[: len(prompt)] == prompt and not any(row.loss[len(prompt) - 8 : len(prompt)])
    assert learnt(own, messages) == [" b\n<|im_end|>"] * turns
    pieces, responses = own.responses(asked, [messages[-1], assistant("c")])
    ids = own.encode([[*pieces, *responses]], [len(pieces)])[0].parts
    assert [token for piece in ids[: len(pieces)] for token in piece] == prompt
    assert [response.text for response in responses] == [" b\n<|im_end|>", "c<|im_end|>"]
    assert row.ids[len(prompt) :][: len(ids[-2])] == ids[-2]
    thoughtful = {"role": "assistant", "content": "<think>\nd\n</think>\n\nc"}
    assert own.responses(asked, [messages[-1], thoughtful]) is None  # a second thought


def test_a_thought_that_the_generation_prompt_leaves_open():
    """An answer without a thought cannot follow it."""
    template = chat_template("chatml").replace("assistant\n{% endif -%}", "assistant\n<think>\n{% endif -%}")
    assert template != chat_template("chatml")
    own = made(template)
    asked, plain = Conversation([user()], "row"), assistant()
    assert own.responses(asked, [plain, plain]) is None
    thoughtful = {"role": "assistant", "content": "<think>\nc\n</think>\n\nb"}
    _, (first, _) = own.responses(asked, [thoughtful, thoughtful])
    assert first.text == "c\n</think>\n\nb<|im_end|>"


def test_a_tokenizer_with_a_template_for_tools():
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = {"default": chat_template("chatml"), "tool_use": chat_template("merges_tools")}
    own = made(None, tokenizer)
    messages = [user(), assistant()]
    assert decoded_runs(own, encoded(own, messages)) == runs(chatml(messages))
    tools = [{"name": "add"}]
    assert decoded_runs(own, encoded(own, messages, tools)) == runs(merges_tools(messages, tools))


def test_the_end_token_takes_blanks_along():
    """Phi-3's way: the token swallows the line break behind it, in the sentence as in the next prompt."""
    tokenizer = chat_tokenizer(chat_template("chatml"))
    tokenizer.add_tokens([AddedToken("<|im_end|>", rstrip=True, special=True)])
    own = made(None, tokenizer)
    messages = [user(), assistant()] * 2
    row = encoded(own, messages)
    assert row.ids == tokenizer.apply_chat_template(messages)["input_ids"]
    ends = [loss for token, loss in zip(row.ids, row.loss, strict=True) if token == own.texts.end_id]
    assert ends == [False, True, False, True] and sum(row.loss) == 4


def test_a_tokenizer_that_adds_a_space_of_its_own():
    """Llama 2's: a turn tokenized alone would begin with a space that nobody wrote."""
    tokenizer = with_a_space_of_its_own()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = chat_template("chatml")
    own = made(None, tokenizer)
    messages = [user(), assistant("a b")]
    row = encoded(own, messages)
    assert row.ids == tokenizer.apply_chat_template(messages)["input_ids"]
    assert [token for token, loss in zip(row.ids, row.loss, strict=True) if loss][-1] == own.texts.end_id
    assert 3 <= sum(row.loss) < len(row.ids) - 3


# Which token ends a conversation.


def test_the_end_of_a_conversation():
    tokenizer = chat_tokenizer(chat_template("llama3"))
    assert conversation_end(ChatArguments(prompt_style="human_assistant"), tokenizer) is None
    assert conversation_end(ChatArguments(), tokenizer) == "<|eot_id|>"
    assert conversation_end(ChatArguments(prompt_style="chat_template"), tokenizer) == "<|eot_id|>"
    plain = ChatArguments(prompt_style="human_assistant", end_of_conversation_token="<|pad|>")
    assert conversation_end(plain, tokenizer) == "<|pad|>"


ENDLESS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "flags", "said"),
    [
        (None, {}, "no chat template.*--chat_template FILE"),
        ("{% for message in messages %}", {}, "not valid Jinja: line 1: .*endfor"),
        (ENDLESS, {}, r"adds '\\n' after the assistant's last text.*never learn to stop"),
        (chat_template("chatml"), {"end_of_conversation_token": "<|endoftext|>"},
         r"adds '<\|im_end\|>\\n' after .*, not '<\|endoftext\|>'"),
        ("{{ messages[-1].content }}<|im_end|>", {}, "does not render each user and assistant message"),
        ("{{ raise_exception('tools first') }}", {}, "rejects alternating user and assistant mess.*--end_of_conv"),
    ],
)  # fmt: skip
def test_templates_that_cannot_be_trained_on(template, flags, said):
    with pytest.raises(ThreestepError, match=said):
        made(template, **flags)


def test_an_end_token_that_is_added_and_one_that_is_not_special():
    """The first is the remedy for a template that ends no turn."""
    own = made(ENDLESS, end_of_conversation_token="<|im_end|>")
    assert learnt(own, [user(), assistant()] * 2) == ["b", "b\n<|im_end|>"] and own.end_token == "<|im_end|>"
    tokenizer = chat_tokenizer(ENDLESS.replace("\n", " STOP\n"))
    tokenizer.add_tokens(["STOP"])
    own = made(None, tokenizer, end_of_conversation_token="STOP")
    assert learnt(own, [user(), assistant()]) == ["b STOP"]


def test_a_template_file_is_saved_with_the_tokenizer(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text(chat_template("chatml"))
    data = ChatArguments(prompt_style="chat_template", chat_template=str(path))
    tokenizer = chat_tokenizer("{{ raise_exception('not this one') }}")
    adopt_style(tokenizer, data)
    tokenizer.save_pretrained(tmp_path)
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template == chat_template("chatml")
    assert ChatTokenizer(data, chat_tokenizer()).end_token == "<|im_end|>"


TOOLS = [{"type": "function", "function": {"name": "f"}}]


# The template of a tokenizer with several, beside transformers' own choice where it has one.


@pytest.mark.parametrize(
    ("templates", "tools", "text"),
    [
        *((templates, tools, None) for tools in (None, TOOLS)
          for templates in ("one", {"default": "d"}, {"default": "d", "tool_use": "t"}, {"default": "d", "x": "y"})),
        ({"chatml": "c"}, None, "c"),
        ({"chatml": "c", "tool_use": "t"}, None, "c"),
        ({"chatml": "c", "tool_use": "t"}, TOOLS, "t"),
        ({"tool_use": "t"}, None, "t"),
    ],
)  # fmt: skip
def test_the_template_of_several(templates, tools, text):
    tokenizer = SimpleNamespace(chat_template=templates)
    theirs = PreTrainedTokenizerFast.get_chat_template(tokenizer, tools=tools) if text is None else text
    assert template_text(tokenizer, tools, "tiny") == theirs


def test_several_without_a_default():
    tokenizer = SimpleNamespace(chat_template={"rag": "r", "chatml": "c"})
    with pytest.raises(ThreestepError, match="^tiny has the chat templates 'rag', 'chatml', but none named 'default'"):
        template_text(tokenizer, None, "tiny")
