"""Formats are told apart by their columns; what a row of each says; and what flags decide."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.utils.base.errors import ThreestepError
from training.utils.data.arguments import SourceArguments
from training.utils.data.files.columns import kind_of
from training.utils.data.formats.formats import FORMATS, FileColumns, recognise
from training.utils.data.formats.records import Record

U, A = "user", "assistant"


def says(role: str, content: str, **more) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def kinds_of(rows: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """As the readers note them: where each kind of value of each column was met first."""
    kinds: dict[str, dict[str, str]] = {}
    for line, row in enumerate(rows, start=1):
        for column, value in row.items():
            seen = kinds.setdefault(column, {})
            if value is not None:
                seen.setdefault(kind_of(value), f"f, line {line}")
    return kinds


def read(rows: list[dict[str, Any]], data_format: str | None = None, **columns: str) -> tuple[str, list[Record]]:
    found = recognise(kinds_of(rows), FileColumns(**columns), data_format, "f")
    return found.name, [found.read(row, found.roles, "f") for row in rows]


def messages(prompt: list | None, chosen: list | None = None, rejected: list | None = None) -> Record:
    return Record(prompt_messages=prompt, chosen_messages=chosen, rejected_messages=rejected)


HI, HO, NO = says(U, "Hi"), says(A, "Ho"), says(A, "No")
BACK = {"from": "human", "value": "Hi"}
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [HI],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0},
}

# name, format, three rows, what they say
CASES = [
    (
        "texts",
        "preference",
        [
            {"prompt": "Human: Hi Assistant:", "chosen": " Ho", "rejected": " No"},
            {"prompt": "a", "chosen": " b", "rejected": None},
            {"prompt": None, "chosen": " b"},
        ],
        [Record("Human: Hi Assistant:", " Ho", " No"), Record("a", " b"), Record(None, " b")],
    ),
    (
        "Dahoas's columns",
        "preference",
        [{"prompt": "a", "response": " b", "chosen": " b", "rejected": " c"}] * 3,
        [Record("a", " b", " c")] * 3,
    ),
    (
        "texts that begin alike",
        "preference",
        [
            {"chosen": "Human: Hi Assistant: Hello", "rejected": "Human: Hi Assistant: Help"},
            {"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"},
            {"chosen": "yes", "rejected": "no"},
        ],
        [Record("Human: Hi Assistant:", " Hello", " Help"), Record("2 + 2 =", " 4", " 5"), Record("", "yes", "no")],
    ),
    (
        "messages",
        "preference",
        [
            {"prompt": [HI], "chosen": [HO], "rejected": [NO]},
            {"prompt": [HI, HO, HI], "chosen": [HO], "rejected": None},
            {"prompt": None, "chosen": [HO], "rejected": [NO]},
        ],
        [messages([HI], [HO], [NO]), messages([HI, HO, HI], [HO]), messages(None, [HO], [NO])],
    ),
    (
        "conversations that begin alike",
        "preference",
        [
            {"chosen": [HI, HO], "rejected": [HI, NO]},
            {"chosen": [HI, HO, HI, HO], "rejected": [HI, HO, HI, NO]},
            {"chosen": [HI, HO], "rejected": [HI, HO]},
        ],
        [messages([HI], [HO], [NO]), messages([HI, HO, HI], [HO], [NO]), messages([HI], [HO], [HO])],
    ),
    (
        "conversations that part at a user's message",
        "preference",
        [
            {"chosen": [HI, HO, HI, HO], "rejected": [HI, HO, says(U, "Bye"), NO]},
            {"chosen": [HI, HO], "rejected": None},
            {"chosen": [HI, HO, HI, HO], "rejected": [HI, NO]},
        ],
        [
            messages([HI], [HO, HI, HO], [HO, says(U, "Bye"), NO]),
            messages([HI], [HO]),
            messages([HI], [HO, HI, HO], [NO]),
        ],
    ),
    (
        "whole conversations beside their first message as text, as in ultrafeedback_binarized",
        "preference",
        [{"prompt": "Hi", "chosen": [HI, HO], "rejected": [HI, NO], "score_chosen": 9.0}] * 3,
        [messages([HI], [HO], [NO])] * 3,
    ),
    (
        "a prompt as text, responses as messages",
        "preference",
        [{"prompt": "Hi", "chosen": HO, "rejected": [NO]}, {"prompt": "Hi", "chosen": HO}, {"prompt": "Hi"}],
        [messages([HI], [HO], [NO]), messages([HI], [HO]), Record("Hi")],
    ),
    (
        "completions",
        "prompt_completion",
        [{"prompt": "a", "completion": " b"}, {"prompt": "a", "completion": None}, {"completion": " b"}],
        [Record("a", " b"), Record("a"), Record(None, " b")],
    ),
    (
        "completions as messages",
        "prompt_completion",
        [{"prompt": [HI], "completion": [HO]}] * 3,
        [messages([HI], [HO])] * 3,
    ),
    (
        "responses",
        "prompt_completion",
        [{"prompt": "a", "response": " b", "score": 1}] * 3,
        [Record("a", " b")] * 3,
    ),
    (
        "completions with a label: a bad one is no response to learn",
        "prompt_completion",
        [
            {"prompt": "a", "completion": " b", "label": True},
            {"prompt": "a", "completion": " c", "label": False},
            {"prompt": "a", "completion": " d", "label": None},
        ],
        [Record("a", " b"), Record("a", None, " c"), Record("a", " d")],
    ),
    ("prompts", "prompt_only", [{"prompt": "a", "answer": "7"}] * 3, [Record("a")] * 3),
    ("verl's", "prompt_only", [VERL] * 3, [messages([HI])] * 3),
    (
        "OpenAI's",
        "messages",
        [
            {"messages": [HI, HO], "tools": None},
            {"messages": [says("system", "S"), HI, HO, HI, NO]},
            {"messages": [HI]},
        ],
        [messages([HI], [HO]), messages([says("system", "S"), HI, HO, HI], [NO]), messages([HI])],
    ),
    (
        "messages beside their first as text, as in no_robots",
        "messages",
        [{"prompt": "Hi", "prompt_id": "1", "messages": [HI, HO]}] * 3,
        [messages([HI], [HO])] * 3,
    ),
    (
        "messages as JSON text, as in CSV",
        "messages",
        [{"messages": json.dumps([HI, HO])}, {"messages": None}, {"messages": "[]"}],
        [messages([HI], [HO]), Record(), messages([])],
    ),
    (
        "ShareGPT's",
        "sharegpt",
        [
            {"conversations": [BACK, {"from": "gpt", "value": "Ho"}], "system": "S", "tools": ""},
            {"conversations": [{"from": "system", "value": "T"}, BACK], "system": "S"},
            {"conversations": [], "system": None},
        ],
        [messages([says("system", "S"), HI], [HO]), messages([says("system", "T"), HI]), messages([])],
    ),
    (
        "LLaMA-Factory's pairs",
        "sharegpt",
        [
            {"conversations": [BACK], "chosen": {"from": "gpt", "value": "Ho"}, "rejected": NO},
            {"conversations": [BACK], "chosen": {"from": "gpt", "value": "Ho"}, "rejected": None},
            {"conversations": [BACK, {"from": "gpt", "value": "No"}], "chosen": {"from": "gpt", "value": "Ho"}},
        ],
        [messages([HI], [HO], [NO]), messages([HI], [HO]), messages([HI, NO], [HO])],
    ),
    (
        "Alpaca's",
        "alpaca",
        [
            {"instruction": "Hi", "input": "", "output": "Ho"},
            {"instruction": "Add", "input": "1 2", "output": "3", "system": "S", "history": [["Hi", "Ho"]]},
            {"instruction": None, "input": "1", "output": "3"},
        ],
        [messages([HI], [HO]), messages([says("system", "S"), HI, HO, says(U, "Add\n1 2")], [says(A, "3")]), Record()],
    ),
    (
        "Dolly's",
        "alpaca",
        [{"instruction": "Hi", "context": "So", "response": "Ho", "category": "x"}] * 3,
        [messages([says(U, "Hi\nSo")], [HO])] * 3,
    ),
    (
        "Alpaca's pairs",
        "alpaca",
        [{"instruction": "Hi", "input": "", "chosen": "Ho", "rejected": "No"}] * 3,
        [messages([HI], [HO], [NO])] * 3,
    ),
    (
        "GSM8K's",
        "question_answer",
        [{"question": "Hi", "answer": "Ho", "rejected": "No"}, {"question": "Hi", "answer": None}, {"answer": "Ho"}],
        [messages([HI], [HO], [NO]), messages([HI]), Record()],
    ),
    (
        "ranked responses",
        "ranked",
        [{"prompt": "a", "responses": [" b", " c"]}, {"prompt": "a", "responses": [" b"]}, {"prompt": "a"}],
        [Record("a", " b", responses=[" b", " c"]), Record("a", " b"), Record("a")],
    ),
    ("text", "text", [{"text": "abc"}, {"text": None}, {"url": "x"}], [Record("", "abc"), Record(""), Record("")]),
]


@pytest.mark.parametrize(("name", "rows", "records"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_each_format(name, rows, records):
    assert len(rows) == len(records) == 3
    assert read(rows, **({"responses": "responses"} if name == "ranked" else {})) == (name, records)
    assert read(rows, data_format=name) == (name, records)  # the flag says what was recognised


def test_every_format_is_tried_and_named_by_the_flags_help():
    assert {case[1] for case in CASES} == set(FORMATS)
    help_text = SourceArguments.__dataclass_fields__["data_format"].metadata["help"]
    assert all(name in help_text for name in FORMATS)


# --- flags


@pytest.mark.parametrize(
    ("row", "columns", "name", "record"),
    [
        (
            {"q": "Q:", "a": " A", "b": " B"},
            {"prompt": "q", "chosen": "a", "rejected": "b"},
            "preference",
            Record("Q:", " A", " B"),
        ),
        ({"q": "Q:", "completion": " A"}, {"prompt": "q"}, "prompt_completion", Record("Q:", " A")),
        ({"q": [HI], "other": 1}, {"prompt": "q"}, "prompt_only", messages([HI])),
        (
            {"better": "a b", "worse": "a c"},
            {"chosen": "better", "rejected": "worse"},
            "preference",
            Record("a", " b", " c"),
        ),
        ({"turns": [HI, HO]}, {"messages": "turns"}, "messages", messages([HI], [HO])),
        ({"turns": [BACK], "good": "Ho"}, {"messages": "turns", "chosen": "good"}, "messages", messages([HI], [HO])),
        ({"body": "abc", "text": "x"}, {"text": "body"}, "text", Record("", "abc")),
        (
            {"q": "Q:", "k": [" A", " B"]},
            {"prompt": "q", "responses": "k"},
            "ranked",
            Record("Q:", " A", responses=[" A", " B"]),
        ),
        (
            {**VERL, "extra_info": {"question": "Q", "answer": " A"}},
            {"prompt": "extra_info.question", "chosen": "extra_info.answer"},
            "prompt_completion",
            Record("Q", " A"),
        ),
        ({"a.b": "Q", "a": {"b": "R"}}, {"prompt": "a.b"}, "prompt_only", Record("Q")),
    ],
)
def test_columns_named_by_flags(row, columns, name, record):
    assert read([row], **columns) == (name, [record])


def test_a_format_and_its_columns_by_flags():
    row = {"task": "Hi", "solution": "Ho", "instruction": "x", "output": "y"}
    assert read([row], "alpaca", prompt="task", chosen="solution") == ("alpaca", [messages([HI], [HO])])


def test_a_responses_column_that_is_not_in_this_file_is_passed_over():
    """Flags hold for all files of a run; the phase that needs the column says so (see FileDataset.check_phase)."""
    assert read([{"prompt": "a", "chosen": " b"}], rejected="worse") == ("prompt_completion", [Record("a", " b")])
    assert read([{"turns": [HI, HO]}], messages="turns", rejected="worse") == ("messages", [messages([HI], [HO])])


def test_a_list_of_responses_is_ranked_where_a_flag_says_so():
    assert read([{"prompt": "a", "responses": [" b", " c"]}])[0] == "prompt_only"


def test_the_chosen_conversation_once_more_is_passed_over():
    """UltraFeedback's `messages`, beside a pair of whole conversations; a flag still asks for it."""
    row = {"prompt": "Hi", "prompt_id": "0", "chosen": [HI, HO], "rejected": [HI, NO], "messages": [HI, HO]}
    assert read([row]) == ("preference", read([{**row, "messages": None}])[1])
    assert read([row], data_format="messages")[0] == "messages"


# --- mistakes


@pytest.mark.parametrize(
    ("row", "fits"),
    [
        ({"messages": [HI, HO], "prompt": "Hi", "chosen": " Ho", "rejected": " No"}, ["preference", "messages"]),
        ({"prompt": "a", "completion": " b", "chosen": " b", "rejected": " c"}, ["preference", "prompt_completion"]),
        ({"messages": [HI], "conversations": [BACK]}, ["messages", "sharegpt"]),
        ({"instruction": "a", "output": "b", "text": "a b"}, ["alpaca", "text"]),
        ({"prompt": "a", "question": "b", "answer": "c"}, ["prompt_only", "question_answer"]),
        ({"prompt": "a", "text": "b"}, ["prompt_only", "text"]),
    ],
)
def test_two_formats_that_both_fit(row, fits):
    with pytest.raises(ThreestepError) as caught:
        read([row])
    columns = ", ".join(f"'{name}'" for name in sorted(row))
    assert str(caught.value) == (
        f"f: the columns {columns} fit 2 formats, {' and '.join(fits)}; decide with "
        f"--data_format {fits[0]} or --data_format {fits[1]}"
    )
    for name in fits:
        assert read([row], data_format=name)[0] == name


def test_no_format_fits():
    with pytest.raises(ThreestepError) as caught:
        read([{"left": "a", "right": "b"}])
    assert str(caught.value).startswith(
        "f: the columns 'left', 'right' fit no format; expected the columns of one of these: "
        "prompt, chosen, rejected (preference); prompt, completion (prompt_completion); "
    )
    assert str(caught.value).endswith(
        "or name columns of your own: questions and answers with --data_format question_answer --prompt_column Q "
        "--chosen_column A, texts as they are stored with --prompt_column, --chosen_column and --rejected_column, "
        "others with --messages_column or --text_column"
    )


@pytest.mark.parametrize(
    ("rows", "given_flags", "fragment"),
    [
        (
            [{"a": "x"}],
            {"prompt": "q"},
            "f: no column 'q'; the columns are 'a'; name the right one with --prompt_column",
        ),
        (
            [{"a": "x"}],
            {"chosen": "a"},
            "f: no column 'prompt'; the columns are 'a'; name the right one with --prompt_c",
        ),
        (
            [{"a": "x"}],
            {"messages": "m"},
            "f: no column 'm'; the columns are 'a'; name the right one with --messages_c",
        ),
        ([{"a": "x"}], {"text": "t.u"}, "f: no column 't.u'; the columns are 'a'; name the right one with --text_colu"),
        (
            [{"k": ["x"]}],
            {"responses": "k"},
            "f: no column 'prompt'; the columns are 'k'; name the right one with --pr",
        ),
        (
            [{"a": "x"}],
            {"messages": "a", "text": "a"},
            "f: --messages_column and --text_column belong to different form",
        ),
        (
            [{"a": "x"}],
            {"prompt": "a", "text": "a"},
            "f: --text_column and --prompt_column belong to different formats",
        ),
        (
            [{"a": "x"}],
            {"responses": "a", "rejected": "a"},
            "--responses_column and --rejected_column belong to differe",
        ),
        (
            [{"a": "x"}],
            {"data_format": "alpaca"},
            "f: --data_format alpaca expects the columns instruction, output, and",
        ),
        (
            [{"a": "x"}],
            {"data_format": "alpacca"},
            "--data_format expects one of preference, prompt_completion, prompt_",
        ),
    ],
)
def test_mistakes_in_flags(rows, given_flags, fragment):
    with pytest.raises(ThreestepError) as caught:
        read(rows, **given_flags)
    assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "fragment"),
    [
        ([{"prompt": "a"}, {"prompt": 5}], "f, line 2: column 'prompt': expected text, got a number"),
        ([{"prompt": [HI]}, {"prompt": "a"}], "f, line 2: column 'prompt': expected a list, got text"),
        ([{"prompt": 5}], "f, line 1: column 'prompt': expected text or a list, got a number"),
        ([{"messages": {"a": 1}}], "f, line 1: column 'messages': expected a list or text, got an object"),
        (
            [{"question": "a", "answer": True}],
            "f, line 1: column 'answer': expected text or a number, got a truth value; write it as text, such as",
        ),
        (
            [{"question": "a", "options": ["a", "b"], "answer": 1}],
            "f, line 1: column 'answer' holds numbers beside 'options', so they may be places in it; write each answer",
        ),
        ([{"instruction": "a", "output": "b", "history": "c"}], "column 'history': expected a list, got text"),
        ([{"text": ["a"]}], "f, line 1: column 'text': expected text, got a list"),
    ],
)
def test_a_column_that_holds_something_else(rows, fragment):
    with pytest.raises(ThreestepError) as caught:
        read(rows)
    assert fragment in str(caught.value)


@pytest.mark.parametrize(
    ("row", "columns", "fragment"),
    [
        (
            {"prompt": [HI], "chosen": [HI, HO], "rejected": [NO]},
            {},
            "f: a response: expected the assistant's message first, got one of role 'user'",
        ),
        (
            {"conversations": [BACK], "chosen": BACK},
            {},
            "f: a response: expected the assistant's message first, got one of role 'user'",
        ),
        ({"prompt": ["Hi"]}, {}, "f, message 1: expected an object, got text"),
        (
            {"prompt": "a", "responses": [" b", 3]},
            {"responses": "responses"},
            "f: column 'responses': expected a list of texts, best first, got [' b', 3]",
        ),
        (
            {"instruction": "a", "output": "b", "history": [["c"]]},
            {},
            "f: history: expected a list of [question, answer], got ['c']",
        ),
        ({"a": {"t": 5}}, {"text": "a.t"}, "f: column 'a.t': expected text, got a number"),
    ],
)
def test_a_row_that_is_not_what_its_format_wants(row, columns, fragment):
    with pytest.raises(ThreestepError) as caught:
        read([row], **columns)
    assert fragment in str(caught.value)


# --- an implicit prompt is the explicit one

TURNS = st.lists(st.text(max_size=5), min_size=0, max_size=4)


@settings(max_examples=100, deadline=None)
@given(TURNS, st.text(max_size=5), st.text(max_size=5))
def test_a_prompt_that_responses_share_is_found(turns, good, bad):
    prompt = [says(U if n % 2 == 0 else A, text) for n, text in enumerate([*turns, "?"][len(turns) % 2 :])]
    chosen, rejected = [says(A, good)], [says(A, bad)]
    (_, explicit), (_, implicit) = (
        read([{"prompt": prompt, "chosen": chosen, "rejected": rejected}]),
        read([{"chosen": prompt + chosen, "rejected": prompt + rejected}]),
    )
    assert explicit == implicit == [messages(prompt, chosen, rejected)]


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20), st.text(max_size=20))
def test_texts_that_begin_alike_lose_nothing(good, bad):
    (record,) = read([{"chosen": good, "rejected": bad}])[1]
    assert record.prompt + record.chosen == good and record.prompt + record.rejected == bad
