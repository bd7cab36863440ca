"""From flags and files to the rows of each phase under a chat template; what is left out is counted or named."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.support.chat_templates import chat_template, chat_tokenizer
from tests.support.said import assistant, user
from tests.unit.utils.data.conftest import ALONE
from training.utils.base.errors import ThreestepError
from training.utils.data.build.build import build_phase
from training.utils.data.kinds.kind import CROSSED, asks_nothing
from training.utils.data.raw_dataset import PromptRawDataset

TALK = [
    user("one"),
    assistant("1"),
    user("two"),
    assistant("2"),
]
PAIR = {"prompt": "Human: What is 2 + 3? Assistant:", "chosen": " 2 + 3 is 5.", "rejected": " It is 4."}
PREFIX = "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"


# A class whose rows are what the getters give: `messages`, or `prompt`, `chosen`, `rejected` messages; tools; kwargs.
GIVEN = {"rejected_messages": "rejected", "tools": "tools", "chat_template_kwargs": "kwargs", "reference": "reference"}
GETTERS = {
    **{f"get_{name}": getattr(PromptRawDataset, f"get_{name}") for name in ("prompt", "chosen", "rejected")},
    **{f"get_{name}": lambda self, row, key=key: row.get(key) for name, key in {**GIVEN, "extra": "extra"}.items()},
    "get_messages": lambda self, row: row.get("messages") or [*row["prompt"], *(row.get("chosen") or [])],
    "get_prompt_messages": lambda self, row: row.get("prompt") or PromptRawDataset.get_prompt_messages(self, row),
    "get_chosen_messages": lambda self, row: row.get("chosen") or PromptRawDataset.get_chosen_messages(self, row),
}


@pytest.fixture
def talks(own):
    """Build a phase from all of the rows."""

    def make(phase, rows, template="chatml", **given):
        known = template in ("chatml", "llama3", "empty_thought")
        tokenizer = chat_tokenizer(chat_template(template) if known else template)
        alone = {"data_split": ALONE[phase], "eval_fraction": 0.0, "prompt_style": "chat_template"}
        return build_phase(phase, own(rows=rows, **GETTERS, **{**alone, **given}), tokenizer, seed=1), tokenizer

    return make


def loss_text(tokenizer, row):
    return tokenizer.decode(row.input_ids[row.loss_mask])


# Phase 1.


def test_every_turn_the_last_or_the_whole_conversation(talks):
    built, tokenizer = talks(1, [{"messages": TALK}])
    (row,) = built.train
    assert tokenizer.decode(row.input_ids) == tokenizer.apply_chat_template(TALK, tokenize=False)
    assert loss_text(tokenizer, row) == "1<|im_end|>2<|im_end|>"
    (last,) = talks(1, [{"messages": TALK}], train_turns="last")[0].train
    assert loss_text(tokenizer, last) == "2<|im_end|>"
    (whole,) = talks(1, [{"messages": TALK}], loss_on="conversation")[0].train
    assert whole.loss_mask.tolist() == [False] + [True] * (len(row.input_ids) - 1)


def test_plain_texts_become_messages(build):
    """Of the turns inside a plain prompt, only the response is learnt. A text without a prompt is no conversation."""
    hh = {**PAIR, "prompt": "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant:"}
    tokenizer = chat_tokenizer(chat_template("chatml"))
    first, second = build(1, [PAIR, hh], tokenizer, prompt_style="chat_template").train
    assert tokenizer.decode(first.input_ids) == PREFIX + "2 + 3 is 5.<|im_end|>\n"
    assert loss_text(tokenizer, first) == loss_text(tokenizer, second) == "2 + 3 is 5.<|im_end|>"
    assert "<|im_start|>assistant\nb<|im_end|>" in tokenizer.decode(second.input_ids)
    (text,) = build(1, [{"text": " Once upon a time\n"}], tokenizer).train
    assert tokenizer.decode(text.input_ids) == " Once upon a time\n<|im_end|>"
    assert text.loss_mask.tolist() == [False] + [True] * (text.length_tokens - 1)


def test_texts_are_taken_as_stored(build):
    """In all phases: only the space of "Human: ... Assistant:" goes, and what the template itself trims."""
    code = {"prompt": "def double(x):\n", "chosen": "    return 2 * x\n", "rejected": "\treturn x\n\n"}
    for name, asked, chosen, rejected in (
        ("chatml", "user\ndef double(x):\n<|im_end|>", "    return 2 * x\n<|im_end|>", "\treturn x\n\n<|im_end|>"),
        ("llama3", "\n\ndef double(x):<|eot_id|>", "return 2 * x<|eot_id|>", "return x<|eot_id|>"),
    ):
        tokenizer = chat_tokenizer(chat_template(name))
        (row,), (pair,) = (build(phase, [code], tokenizer, prompt_style="auto").train for phase in (1, 2))
        assert loss_text(tokenizer, row) == chosen
        assert [tokenizer.decode(ids) for ids in pair.response_ids] == [chosen, rejected]
        assert asked in tokenizer.decode(row.input_ids) and asked in tokenizer.decode(pair.prompt_ids)


def test_a_line_break_behind_the_last_turn_does_not_decide_whether_a_row_fits(talks):
    whole = talks(1, [{"messages": TALK}])[0].train[0].input_ids.tolist()
    for truncation in ("drop", "error", "left", "right"):
        built, tokenizer = talks(1, [{"messages": TALK}], truncation=truncation, max_seq_len=len(whole) - 1)
        assert built.train[0].input_ids.tolist() == whole[:-1] and tokenizer.decode(whole[-1:]) == "\n"
        assert (built.report.train.truncated, built.report.train.dropped) == (0, {})
    cut, _ = talks(1, [{"messages": TALK}], truncation="left", max_seq_len=len(whole) - 2)
    assert cut.train[0].input_ids.tolist() == whole[1:-1] and cut.report.train.truncated == 1


def test_the_tokens_that_end_responses_are_counted(talks):
    """Of what is learnt; a template may end a tool call otherwise, and write special tokens inside a turn."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}</s>"
        "{% elif 'b' in m.content %}<|eot_id|>b<|im_end|>{% else %}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = assistant("a", tool_calls=[{"function": {"name": "a", "arguments": {}}}])
    rows = [[user("u"), call, {"role": "tool", "content": "t"}, assistant(content)] for content in "cab"]
    report = talks(1, [{"messages": row} for row in rows], template)[0].report
    assert report.train.ends == {"</s>": 3, "<|im_end|>": 3} and report.train.inside == {"<|eot_id|>": 1}
    assert report.stops == (["</s>", "<|im_end|>"], ["<|eot_id|>"])
    said = {"prompt": [user("u")], "chosen": [rows[0][3]], "rejected": [rows[1][3]]}
    report = talks(2, [said], template)[0].report
    assert report.train.ends == {"<|im_end|>": 2}
    quoted = {"messages": [user("u"), assistant("c </s> c")]}
    report = talks(1, [quoted], template, train_turns="last")[0].report
    assert report.stops == (["<|im_end|>"], ["</s>"])


def test_tools_and_kwargs_of_a_row(talks):
    template = "{{ tools[0].name if tools else 'no tools' }} {{ tone }}" + chat_template("chatml")
    rows = [
        {"messages": TALK, "tools": '[{"name": "add"}]', "kwargs": {"tone": "kind"}},
        {"messages": TALK, "tools": None},
    ]
    built, tokenizer = talks(1, rows, template, chat_template_kwargs='{"tone": "plain"}')
    begins = {tokenizer.decode(row.input_ids).partition("<")[0] for row in built.train}
    assert begins == {"add kind", "no tools plain"}


def test_what_phase_1_leaves_out_is_counted(talks):
    rows = [{"messages": talk} for talk in (TALK, TALK[:1], TALK * 9, [{"role": "narrator", "content": "x"}, *TALK])]
    built, _ = talks(1, rows, truncation="drop", max_seq_len=40, bad_conversations="drop")
    assert built.report.train.dropped == {"no_assistant_turn": 1, "too_long": 1, "bad_conversation": 1}


def test_a_long_conversation_is_cut(talks):
    built, tokenizer = talks(1, [{"messages": TALK * 9}], truncation="left", max_seq_len=40)
    (row,) = built.train
    assert len(row.input_ids) == 40 and built.report.train.truncated == 1
    assert loss_text(tokenizer, row).endswith("2<|im_end|>") and row.loss_mask.sum() < 2 * 18


ENDS_LAST = chat_template("chatml").replace(
    "message.content + '<|im_end|>' }}{% else", "message.content + ('<|im_end|>' if loop.last else '') }}{% else"
)
NO_END = chat_template("chatml").replace(
    "message.content + '<|im_end|>' }}{% else",
    "message.content + ('' if message.content == 'two' else '<|im_end|>') }}{% else",
)
THREE = [assistant("3")]
TRIED = {"prompt": TALK[:3], "chosen": TALK[3:], "rejected": THREE}


@pytest.mark.parametrize(
    ("phase", "row", "template", "given", "said"),
    [
        (1, {"messages": TALK}, "chatml", {"truncation": "error", "max_seq_len": 9},
         "'own', row id 0: a sentence has .* tokens, but --max_seq_len is 9"),
        (1, {"messages": [{"role": "narrator", "content": "x"}, *TALK]}, "chatml", {},
         "dataset 'own', row 0, message 1: expected one of the roles .*'narrator'"),
        (1, {"messages": [*TALK, {"role": "system", "content": "s"}]}, "llama3", {},
         "row 0: the chat template refuses .*the system message comes first"),
        (1, {"messages": TALK}, ENDS_LAST, {}, "row 0, message 2 .assistant.: the chat template writes no end-of-turn"),
        (2, {**TRIED, "rejected": TALK[:1]}, "chatml", {},
         "row 0, rejected: expected an assistant message, got .*'user'"),
        (2, {**TRIED, "rejected": [assistant("two")]}, NO_END, {},
         "row 0: the chat template writes no end-of-turn token after the response: the text ends in .*assistant.*two"),
        (3, {"messages": TALK}, "chatml", {"max_prompt_seq_len": 9, "prompt_truncation": "error"},
         "'own', row id 0: a prompt has .* --max_prompt_seq_len is 9"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_serve_is_named(talks, phase, row, template, given, said):
    with pytest.raises(ThreestepError, match=said):
        talks(phase, [row], template, **given)


def test_a_turn_without_end_is_no_matter_where_it_is_not_learnt(talks):
    built, tokenizer = talks(1, [{"messages": TALK}], ENDS_LAST, train_turns="last")
    assert loss_text(tokenizer, built.train[0]) == "2<|im_end|>"


# Phases 2 and 3.


def test_a_prompt_has_the_same_ids_in_all_phases(talks):
    row = {"prompt": TALK[:3], "chosen": TALK[3:], "rejected": [{**TALK[3], "content": "3"}], "reference": 7}
    for template, given in (("chatml", {}), ("llama3", {}), ("empty_thought", {"enable_thinking": False})):
        flags = {"chat_template_kwargs": json.dumps(given)}
        sentence, pair, prompt = (talks(phase, [row], template, **flags)[0].train[0] for phase in (1, 2, 3))
        ids = prompt.flipped_prompt_ids[::-1].tolist()
        assert ids == pair.prompt_ids.tolist() == sentence.input_ids[: len(ids)].tolist()
        assert sentence.loss_mask[len(ids)] and not sentence.loss_mask[len(ids) - 1]
        assert prompt.reference == 7
        tokenizer = chat_tokenizer(chat_template(template))
        asked = tokenizer.apply_chat_template(TALK[:3], tokenize=False, add_generation_prompt=True, **given)
        assert prompt.prompt_text == asked


def test_a_token_across_the_edge_of_a_prompt_is_counted(talks):
    """A pair shares the tokens before it, and each response has the ids that it has behind the prompt."""
    answers = [[{**TALK[3], "content": text}] for text in ("\n3", "3")]
    built, tokenizer = talks(2, [{"prompt": TALK[:3], "chosen": answers[0], "rejected": answers[1]}])
    assert built.report.train.noted == {CROSSED: 1}
    (row,) = built.train
    for answer, ids in zip(answers, row.response_ids, strict=True):
        whole = tokenizer.apply_chat_template([*TALK[:3], *answer])["input_ids"]
        assert [*row.prompt_ids, *ids] == whole[: len(row.prompt_ids) + len(ids)]


def test_a_plain_prompt_is_known_by_its_text(build):
    """To reward functions and checkers; its full prompt is what the template makes of it."""
    tokenizer = chat_tokenizer(chat_template("chatml"))
    (pair,) = build(2, [PAIR], tokenizer, prompt_style="chat_template").train
    assert tokenizer.decode(pair.prompt_ids) == PREFIX
    (prompt,) = build(3, [PAIR], tokenizer, prompt_style="chat_template", return_columns=["full_prompts"]).train
    assert np.array_equal(prompt.flipped_prompt_ids[::-1], pair.prompt_ids)
    assert prompt.prompt_text == PAIR["prompt"] and prompt.columns["full_prompts"] == PREFIX


def test_what_phase_2_leaves_out_is_counted(talks):
    good = TRIED
    rows = [
        good,
        {**good, "rejected": None},
        {**good, "rejected": good["chosen"]},
        {**good, "rejected": [assistant(" ")]},
        {**good, "chosen": [*TALK[3:], *TALK]},
        {**good, "prompt": [{"role": "user", "content": "long " * 50}]},
    ]
    built, _ = talks(2, rows, truncation="drop", max_seq_len=60)
    assert built.report.train.rows == 1
    assert built.report.train.dropped == {
        "no_rejected": 1,
        "identical_responses": 1,
        "empty_response": 1,
        "response_of_several_messages": 1,
        "too_long": 1,
    }


def test_a_prompt_that_is_no_prefix_is_counted(talks):
    """A template that opens a thought for every answer and strips it from the answers themselves."""
    template = chat_template("chatml").replace(
        "<|im_start|>assistant\n{% endif -%}", "<|im_start|>assistant\n<think>{% endif -%}"
    )
    answers = {"chosen": [assistant("3")], "rejected": [assistant("4")]}
    with pytest.raises(ThreestepError, match="all 1 rows of 'own' were dropped .1 prompt_no_prefix_of_the_response."):
        talks(2, [{"prompt": TALK[:1], **answers}], template)
    built, tokenizer = talks(1, [{"prompt": TALK[:1], **answers}], template)
    assert loss_text(tokenizer, built.train[0]) == "3<|im_end|>"
    assert "1 trained without the end of the generation prompt" in built.report.sentence
    thoughtless, _ = talks(1, [{"messages": TALK}], "empty_thought", chat_template_kwargs='{"enable_thinking": false}')
    assert thoughtless.report.train.noted == {}


def test_what_a_prompt_of_messages_carries(talks):
    asked = {"return_columns": ["raw_prompt_ids", "raw_prompt", "full_prompts"]}
    rows = [{"messages": TALK, "reference": "2", "extra": {"data_source": "counting", "index": 5}}]
    built, tokenizer = talks(3, rows, max_prompt_seq_len=10, prompt_truncation="left", **asked)
    (row,) = built.train
    ids = row.flipped_prompt_ids[::-1].tolist()
    assert row.reference == "2" and len(ids) == 10
    assert row.columns == {
        "data_source": "counting", "index": 5, "raw_prompt": TALK[:3], "raw_prompt_ids": ids,
        "full_prompts": row.prompt_text,
    }  # fmt: skip
    assert row.prompt_text.startswith("<|im_start|>user\none<|im_end|>")
    (plain,) = talks(3, rows[:1])[0].train
    assert plain.columns == {"data_source": "counting", "index": 5}


# Reasoning that the template does not read.

READS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.thinking and loop.last %}<think>\n{{ m.thinking }}\n"
    "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
READS_PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ '[THINK]' + part.thinking + '[/THINK]' if part.type == 'thinking' else part.text }}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = user("2 + 3")
REASONED = {"role": "assistant", "content": "5", "reasoning_content": "2 and 3"}
GUESSED = {"role": "assistant", "content": "4", "reasoning": "a guess"}


@pytest.mark.parametrize(
    ("template", "thought", "guess"),
    [
        (READS_THINKING, "<think>\n2 and 3\n</think>\n\n5<|im_end|>", "<think>\na guess\n</think>\n\n4<|im_end|>"),
        (READS_PARTS, "[THINK]2 and 3[/THINK]5<|im_end|>", "[THINK]a guess[/THINK]4<|im_end|>"),
    ],
)
def test_reasoning_is_learnt_under_the_key_that_the_template_reads(talks, template, thought, guess):
    built, tokenizer = talks(1, [{"messages": [QUESTION, REASONED]}], template)
    assert loss_text(tokenizer, built.train[0]) == thought
    assert built.report.train.noted == {"whose reasoning moved to the key that the chat template reads": 1}
    built, _ = talks(2, [{"prompt": [QUESTION], "chosen": [REASONED], "rejected": [GUESSED]}], template)
    assert [tokenizer.decode(ids) for ids in built.train[0].response_ids] == [thought, guess]
    assert sum(built.report.train.noted.values()) == 1


def test_prompts_have_reasoning_as_the_rows_of_phase_1_do(talks):
    template = READS_THINKING.replace(" and loop.last", "")
    talk = [QUESTION, REASONED, QUESTION, GUESSED]
    learnt, tokenizer = talks(1, [{"messages": talk}], template)
    asked, _ = talks(3, [{"messages": talk}], template)
    prompt = tokenizer.decode(asked.train[0].flipped_prompt_ids[::-1])
    assert "2 and 3" in prompt and tokenizer.decode(learnt.train[0].input_ids).startswith(prompt)


def test_a_line_of_the_log_says_what_the_template_leaves_out(build):
    tokenizer = chat_tokenizer(chat_template("chatml"))
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
    rows, lines = [{"messages": [QUESTION, REASONED], "tools": tools}], []
    build(1, rows, tokenizer, prompt_style="auto", log=lines.append)
    warnings = [line for line in lines if line.startswith("warning: 1 training rows: ")]
    assert len(warnings) == 2 and "--chat_template FILE" in warnings[0] and "tools" in warnings[1]
    lines.clear()
    build(1, rows, tokenizer, prompt_style="auto", log=lines.append)
    assert [line for line in lines if line in warnings] == warnings  # also of rows in the cache


def test_prompts_that_ask_nothing_are_dropped_and_counted(talks):
    """Of such a row the template's frame alone would be left. An environment may begin with a prompt of its own."""
    system = {"role": "system", "content": "Be brief."}
    blank = user(" \n")
    empty = [[blank], [system, blank], [blank, assistant(""), blank]]
    asking = [[QUESTION], [system], [blank, TALK[1], blank]]
    rows = [{"prompt": messages} for messages in (*empty, *asking)]
    report = talks(3, rows)[0].report.train
    assert (report.rows, report.dropped) == (3, {"empty_prompt": 3})
    report = talks(3, rows, return_columns=["raw_prompt"])[0].report.train
    assert (report.rows, report.dropped) == (6, {}) and list(report.noted.values()) == [3]
    assert not asks_nothing([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ""}]}])
