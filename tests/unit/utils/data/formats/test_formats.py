"""Formats are told apart by their columns, however spelt; what a row says, what flags decide, what is not read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.data_flags import raw_dataset_of
from tests.support.said import assistant, says
from training.utils.base.errors import ThreestepError
from training.utils.data.arguments import SourceArguments
from training.utils.data.files.columns import kind_of
from training.utils.data.formats.formats import (
    FORMATS,
    FileColumns,
    as_formats_spell,
    nearest_format,
    recognise,
)
from training.utils.data.formats.records import Record
from training.utils.data.kinds.kind import CROSSED, GLUED
from training.utils.data.raw_dataset import Recognition

U, A = "user", "assistant"


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

S, BYE = says("system", "S"), says(U, "Bye")
PAIR_OF_TURNS = messages([HI], [HO], [NO])
TAUGHT, TAUGHT_BY_S = messages([HI], [HO]), messages([S, HI], [HO])
GPT = {"from": "gpt", "value": "Ho"}
TEXTS = {"prompt": "a", "completion": " b"}

# What is particular, the format, a row, what it says. A row without a name is one more of the last.
CASES = [
    ("texts", "preference", {"prompt": "Human: Hi Assistant:", "chosen": " Ho", "rejected": " No"},
     Record("Human: Hi Assistant:", " Ho", " No")),
    ("", "preference", {"prompt": "a", "chosen": " b", "rejected": None}, Record("a", " b")),
    ("", "preference", {"prompt": None, "chosen": " b", "rejected": None}, Record(None, " b")),
    ("Dahoas's columns", "preference", {"prompt": "a", "response": " b", "chosen": " b", "rejected": " c"},
     Record("a", " b", " c")),
    ("texts that begin alike", "preference",
     {"chosen": "Human: Hi Assistant: Hello", "rejected": "Human: Hi Assistant: Help"},
     Record("Human: Hi Assistant:", " Hello", " Help")),
    ("", "preference", {"chosen": "2 + 2 = 4", "rejected": "2 + 2 = 5"}, Record("2 + 2 =", " 4", " 5")),
    ("", "preference", {"chosen": "yes", "rejected": "no"}, Record("", "yes", "no")),
    ("messages", "preference", {"prompt": [HI], "chosen": [HO], "rejected": [NO]}, PAIR_OF_TURNS),
    ("conversations that begin alike", "preference", {"chosen": [HI, HO], "rejected": [HI, NO]}, PAIR_OF_TURNS),
    ("", "preference", {"chosen": [HI, HO, HI, HO], "rejected": [HI, HO, HI, NO]}, messages([HI, HO, HI], [HO], [NO])),
    ("", "preference", {"chosen": [HI, HO], "rejected": [HI, HO]}, messages([HI], [HO], [HO])),
    ("conversations that part at a user's message", "preference",
     {"chosen": [HI, HO, HI, HO], "rejected": [HI, HO, BYE, NO]}, messages([HI], [HO, HI, HO], [HO, BYE, NO])),
    ("", "preference", {"chosen": [HI, HO, HI, HO], "rejected": [HI, NO]}, messages([HI], [HO, HI, HO], [NO])),
    ("whole conversations beside their first message as text, as in ultrafeedback_binarized", "preference",
     {"prompt": "Hi", "chosen": [HI, HO], "rejected": [HI, NO], "score_chosen": 9.0}, PAIR_OF_TURNS),
    ("a prompt as text, responses as messages", "preference", {"prompt": "Hi", "chosen": HO, "rejected": [NO]},
     PAIR_OF_TURNS),
    ("completions", "prompt_completion", TEXTS, Record("a", " b")),
    ("", "prompt_completion", {"prompt": "a", "completion": None}, Record("a")),
    ("", "prompt_completion", {"prompt": None, "completion": " b"}, Record(None, " b")),
    ("completions as messages", "prompt_completion", {"prompt": [HI], "completion": [HO]}, TAUGHT),
    ("responses", "prompt_completion", {"prompt": "a", "response": " b", "score": 1}, Record("a", " b")),
    ("a good one", "prompt_completion", {**TEXTS, "label": True}, Record("a", " b")),
    ("a bad one is no response to learn", "prompt_completion", {**TEXTS, "label": False}, Record("a", None, " b")),
    ("prompts", "prompt_only", {"prompt": "a", "answer": "7"}, Record("a")),
    ("verl's", "prompt_only", VERL, messages([HI])),
    ("OpenAI's", "messages", {"messages": [S, HI, HO, HI, NO], "tools": None}, messages([S, HI, HO, HI], [NO])),
    ("", "messages", {"messages": [HI]}, messages([HI])),
    ("messages beside their first as text, as in no_robots", "messages",
     {"prompt": "Hi", "prompt_id": "1", "messages": [HI, HO]}, TAUGHT),
    ("messages as JSON text, as in CSV", "messages", {"messages": json.dumps([HI, HO])}, TAUGHT),
    ("", "messages", {"messages": "[]"}, messages([])),
    ("", "messages", {"messages": None}, Record()),
    ("system_prompt beside messages", "messages", {"messages": [HI, HO], "system_prompt": "S"}, TAUGHT_BY_S),
    ("system beside a conversation with its own", "messages", {"messages": [S, HI, HO], "system": "T"}, TAUGHT_BY_S),
    ("LLaMA-Factory's pair", "messages", {"messages": [HI], "chosen": HO, "rejected": NO}, PAIR_OF_TURNS),
    ("ShareGPT's", "sharegpt", {"conversations": [BACK, GPT], "system": "S", "tools": ""}, TAUGHT_BY_S),
    ("", "sharegpt", {"conversations": [], "system": None}, messages([])),
    ("ShareGPT's pair", "sharegpt", {"conversations": [BACK], "chosen": GPT, "rejected": NO}, PAIR_OF_TURNS),
    ("", "sharegpt", {"conversations": [BACK, {**GPT, "value": "No"}], "chosen": GPT}, messages([HI, NO], [HO])),
    ("Alpaca's", "alpaca", {"instruction": "Hi", "input": "", "output": "Ho"}, TAUGHT),
    ("", "alpaca", {"instruction": "Add", "input": "1 2", "output": "3", "system": "S", "history": [["Hi", "Ho"]]},
     messages([S, HI, HO, says(U, "Add\n1 2")], [says(A, "3")])),
    ("", "alpaca", {"instruction": None, "input": "1", "output": "3"}, Record()),
    ("Alpaca's pairs", "alpaca", {"instruction": "Hi", "input": "", "chosen": "Ho", "rejected": "No"}, PAIR_OF_TURNS),
    ("Alpaca's system_prompt", "alpaca", {"instruction": "Hi", "output": "Ho", "system_prompt": "S"}, TAUGHT_BY_S),
    ("Dolly's", "alpaca", {"instruction": "Hi", "context": "So", "response": "Ho", "category": "x"},
     messages([says(U, "Hi\nSo")], [HO])),
    ("GSM8K's", "question_answer", {"question": "Hi", "answer": "Ho", "rejected": "No"}, PAIR_OF_TURNS),
    ("", "question_answer", {"question": "Hi", "answer": None}, messages([HI])),
    ("", "question_answer", {"question": None, "answer": "Ho"}, Record()),
    ("OpenOrca's", "question_answer", {"id": "1", "system_prompt": "S", "question": "Hi", "response": "Ho"},
     TAUGHT_BY_S),
    ("orca_dpo_pairs'", "question_answer", {"system": "S", "question": "Hi", "chosen": "Ho", "rejected": "No"},
     messages([S, HI], [HO], [NO])),
    ("distilabel's", "question_answer", {"system": "S", "input": "Hi", "chosen": "Ho", "rejected": "No"},
     messages([S, HI], [HO], [NO])),
    ("an instruction beside a question and its response", "alpaca",
     {"instruction": "Do", "question": "Hi", "response": "Ho"}, messages([says(U, "Do\nHi")], [HO])),
    ("MetaMathQA's", "question_answer", {"query": "Hi", "response": "Ho", "type": "x"}, TAUGHT),
    ("input and output", "question_answer", {"input": "Hi", "output": "Ho"}, TAUGHT),
    ("ranked responses", "ranked", {"prompt": "a", "responses": [" b", " c"]},
     Record("a", " b", responses=[" b", " c"])),
    ("", "ranked", {"prompt": "a", "responses": [" b"]}, Record("a", " b")),
    ("", "ranked", {"prompt": "a", "responses": None}, Record("a")),
    ("text", "text", {"text": "abc"}, Record("", "abc")),
    ("", "text", {"text": None}, Record("")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row", "record"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_each_format(name, row, record):
    assert read([row], **({"responses": "responses"} if name == "ranked" else {})) == (name, [record])
    assert read([row], data_format=name) == (name, [record])  # the flag says what was recognised


def test_every_format_is_tried_and_named_by_the_flags_help():
    assert {case[1] for case in CASES} == set(FORMATS)
    help_text = SourceArguments.__dataclass_fields__["data_format"].metadata["help"]
    assert all(name in help_text for name in FORMATS)


# --- flags


NESTED = {**VERL, "extra_info": {"question": "Q", "answer": " A"}}


@pytest.mark.parametrize(
    ("row", "columns", "name", "record"),
    [
        ({"q": "Q", "a": " A", "b": " B"}, {"prompt": "q", "chosen": "a", "rejected": "b"}, "preference",
         Record("Q", " A", " B")),
        ({"q": "Q:", "completion": " A"}, {"prompt": "q"}, "prompt_completion", Record("Q:", " A")),
        ({"q": [HI], "other": 1}, {"prompt": "q"}, "prompt_only", messages([HI])),
        ({"better": "a b", "worse": "a c"}, {"chosen": "better", "rejected": "worse"}, "preference",
         Record("a", " b", " c")),
        ({"turns": [HI, HO]}, {"messages": "turns"}, "messages", TAUGHT),
        ({"turns": [BACK], "good": "Ho"}, {"messages": "turns", "chosen": "good"}, "messages", TAUGHT),
        ({"body": "abc", "text": "x"}, {"text": "body"}, "text", Record("", "abc")),
        ({"q": "Q:", "k": [" A", " B"]}, {"prompt": "q", "responses": "k"}, "ranked",
         Record("Q:", " A", responses=[" A", " B"])),
        (NESTED, {"prompt": "extra_info.question", "chosen": "extra_info.answer"}, "prompt_completion",
         Record("Q", " A")),
        ({"a.b": "Q", "a": {"b": "R"}}, {"prompt": "a.b"}, "prompt_only", Record("Q")),
        ({"task": "Hi", "solution": "Ho", "instruction": "x", "output": "y"},
         {"data_format": "alpaca", "prompt": "task", "chosen": "solution"}, "alpaca", TAUGHT),
        # Flags hold for all files of a run; the phase that needs the column says so (see FileDataset.check_phase).
        ({"prompt": "a", "chosen": " b"}, {"rejected": "worse"}, "prompt_completion", Record("a", " b")),
        ({"turns": [HI, HO]}, {"messages": "turns", "rejected": "worse"}, "messages", TAUGHT),
        ({"prompt": "a", "responses": [" b", " c"]}, {}, "prompt_only", Record("a")),  # ranked where a flag says so
    ],
)  # fmt: skip
def test_columns_named_by_flags(row, columns, name, record):
    assert read([row], **columns) == (name, [record])


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
        "or name your own columns: questions and answers with --data_format question_answer --prompt_column Q "
        "--chosen_column A, text to use as stored with --prompt_column, --chosen_column and --rejected_column, "
        "other data with --messages_column or --text_column, or your own class with --dataset_module"
    )


def no_column(name, flag):
    return f"f: no column '{name}'; the columns are 'a'; name the right one with {flag}"


X = {"a": "x"}


@pytest.mark.parametrize(
    ("rows", "given_flags", "fragment"),
    [
        ([X], {"prompt": "q"}, no_column("q", "--prompt_column")),
        ([X], {"chosen": "a"}, no_column("prompt", "--prompt_column")),
        ([X], {"messages": "m"}, no_column("m", "--messages_column")),
        ([X], {"text": "t.u"}, no_column("t.u", "--text_column")),
        ([{"a": ["x"]}], {"responses": "a"}, no_column("prompt", "--prompt_column")),
        ([X], {"messages": "a", "text": "a"}, "f: --messages_column and --text_column belong to different formats"),
        ([X], {"prompt": "a", "text": "a"}, "f: --text_column and --prompt_column belong to different formats"),
        ([X], {"responses": "a", "rejected": "a"}, "--responses_column and --rejected_column belong to different"),
        ([X], {"data_format": "alpaca"}, "f: --data_format alpaca expects the columns instruction, output, but"),
        ([X], {"data_format": "alpacca"}, "--data_format expects one of preference, prompt_completion, prompt_"),
        ([{"question": "a", "answer": "b"}], {"data_format": "question_answer", "prompt": "Question"},
         "f: --data_format question_answer expects the columns question, answer, but the columns are 'answer', "
         "'question', without the 'Question' of --prompt_column; did you mean 'question'; name one of these"),
        # a column that holds something else
        ([{"prompt": "a"}, {"prompt": 5}], {}, "f, line 2: column 'prompt': expected text, got a number"),
        ([{"prompt": [HI]}, {"prompt": "a"}], {}, "f, line 2: column 'prompt': expected a list, got text"),
        ([{"prompt": 5}], {}, "f, line 1: column 'prompt': expected text or a list, got a number"),
        ([{"messages": {"a": 1}}], {}, "f, line 1: column 'messages': expected a list or text, got an object"),
        ([{"question": "a", "answer": True}], {},
         "f, line 1: column 'answer': expected text or a number, got a truth value; write it as text, such as"),
        ([{"question": "a", "Options": ["a", "b"], "answer": 1}], {},
         "f, line 1: column 'answer' holds numbers that may be positions in 'Options'; write each answer"),
        ([{"instruction": "a", "output": "b", "history": "c"}], {}, "column 'history': expected a list, got text"),
        ([{"text": ["a"]}], {}, "f, line 1: column 'text': expected text, got a list"),
        # a number of several texts
        ([{"question": "a", "answer": 4.0}], {},
         "f: column 'answer': expected text or a number with only one spelling, got 4.0; write it as text, "),
        ([{"question": "a", "answer": float("nan")}], {}, "got nan; write it as text, or null if there is none"),
        ([{"question": "a", "answer": float("inf")}], {}, "got inf; write it as text, or null if there is none"),
        # a row that is not what its format wants
        ([{"prompt": [HI], "chosen": [HI, HO], "rejected": [NO]}], {},
         "f: a response: expected an assistant message first, got one with the role 'user'"),
        ([{"conversations": [BACK], "chosen": BACK}], {},
         "f: a response: expected an assistant message first, got one with the role 'user'"),
        ([{"prompt": ["Hi"]}], {}, "f, message 1: expected an object, got text"),
        ([{"prompt": "a", "responses": [" b", 3]}], {"responses": "responses"},
         "f: column 'responses': expected a list of strings, best first, got [' b', 3]"),
        ([{"instruction": "a", "output": "b", "history": [["c"]]}], {},
         "f: history: expected a list of [question, answer], got ['c']"),
        ([{"a": {"t": 5}}], {"text": "a.t"}, "f: column 'a.t': expected text, got a number"),
    ],
)  # fmt: skip
def test_mistakes_in_flags_and_columns(rows, given_flags, fragment):
    with pytest.raises(ThreestepError) as caught:
        read(rows, **given_flags)
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


def recognised(row, data_format=None, **columns):
    return recognise(kinds_of([row]), FileColumns(**columns), data_format, "f")


def test_capitals_and_blanks():
    row = {" Prompt": "a", "Completion ": "b", "System": "s", "Label": True}
    found = recognised(row)
    assert found.name == "prompt_completion"
    assert found.roles == {"system": "System", "prompt": " Prompt", "chosen": "Completion ", "label": "Label"}
    assert recognised({"Question": "a", "Answer": "b"}, "question_answer").roles["prompt"] == "Question"
    record = found.read(row, found.roles, "f")
    assert [message["content"] for message in record.prompt_messages or ()] == ["s", "a"]
    assert [message["content"] for message in record.chosen_messages or ()] == ["b"]


def test_exact_names_come_first():
    row = {"question": "a", "answer": "b", "Question": "c", "ANSWER": "d"}
    assert recognised(row).roles == {"prompt": "question", "chosen": "answer"}
    assert as_formats_spell({"A": {}, "a": {}}, lambda kinds: False) == {"A": "A", "a": "a"}


@pytest.mark.parametrize(
    ("columns", "remark"),
    [
        (["questoin", "answer"], "; the closest is question_answer, if 'questoin' is its 'question'"),
        (["Promt", "Completion"], "; the closest is prompt_completion, if 'Promt' is its 'prompt'"),
        (["left", "right"], ""),
        (["questoin", "anwser"], ""),  # nothing is sure
    ],
)
def test_the_nearest_format(columns, remark):
    needs = {"prompt_completion": "prompt, completion", "question_answer": "question, answer", "text": "text"}
    assert nearest_format(columns, needs) == remark


def test_numbers_are_their_text():
    row = {"question": "a", "answer": 7, "rejected": 2.5}
    found = recognised(row)
    record = found.read(row, found.roles, "f")
    assert record.chosen_messages == [assistant("7")]
    assert record.rejected_messages == [assistant("2.5")]
    pair = recognised({"prompt": "a", "chosen": 1, "rejected": 2})
    assert pair.read({"prompt": "a", "chosen": 1, "rejected": 2}, pair.roles, "f") == Record("a", "1", "2")


ROW = {"question": "Hi", "answer": "Ho", "topic": "greetings", "tags": ["a"], "score": 3, "hard": True}


@pytest.fixture
def recognition(flags):
    def of(rows, **given):
        data = flags(rows, **given)
        return raw_dataset_of(data.source.data_path[0], data, 1).get_recognition()

    return of


def test_what_is_read_and_what_is_not(recognition, build):
    found = recognition([ROW])
    columns = {"question": "prompt", "answer": "chosen"}
    assert found == Recognition("question_answer", "its columns", columns, ("topic", "tags"), ("score", "hard"))
    assert found.sentence == (
        "read as question_answer because of its columns: prompt 'question', chosen 'answer'; not read: 'tags', 'topic'"
    )
    assert json.loads(json.dumps(found.as_json())) == found.as_json()
    for _ in range(2):  # built, and from the cache
        lines: list[str] = []
        build(1, [ROW] * 4, log=lines.append)
        (said,) = [line for line in lines if "not read" in line]
        assert said.endswith("not read: 'tags', 'topic'")


def test_flags_and_parts_of_columns(recognition):
    rows = [{"extra_info": {"q": "Hi", "a": "Ho"}, "truth": "5", "weight": 1.0}]
    columns = {"prompt_column": "extra_info.q", "chosen_column": "extra_info.a", "reference_column": "truth"}
    found = recognition(rows, **columns, margin_column="weight")
    columns = {"extra_info.q": "prompt", "extra_info.a": "chosen", "weight": "margin", "truth": "reference"}
    assert found == Recognition("prompt_completion", "--prompt_column and --chosen_column", columns)
    assert "not read" not in found.sentence


@pytest.mark.needs_plugin("embedded")
def test_a_class_decides_itself(flags):
    data = flags(data_path=["embedded"])
    assert raw_dataset_of("embedded", data, 1).get_recognition() is None


def test_texts_that_meet_without_a_blank_are_counted(build):
    """What `--prompt_column question --chosen_column answer` makes of questions and answers."""
    rows = [{"prompt": "What?", "completion": "5"}, {"prompt": "What? ", "completion": "5"}]
    rows += [{"prompt": "What?", "completion": " 5"}, {"prompt": "What?", "completion": "\n5"}]
    report = build(1, rows).report
    assert report.train.noted == {GLUED: 1, CROSSED: 1} and f"1 {GLUED}" in report.sentence
    asked = {"data_format": "question_answer", "prompt_column": "prompt", "chosen_column": "completion"}
    assert build(1, rows, **asked).report.train.noted == {}


def test_trees_are_named(recognition):
    rows = [{"message_id": "1", "parent_id": None, "role": "prompter", "text": "Hi", "lang": "en"}]
    rows += [{"message_id": "2", "parent_id": "1", "role": "assistant", "text": "Ho", "lang": "en"}]
    found = recognition(rows)
    assert found.format == "messages" and found.texts_not_read == ("message_id", "parent_id", "lang")
    assert found.why == "conversation trees (2 messages, 1 of them answers, each with its prompt)"
    assert recognition(rows, text_column="text").format == "text"  # a flag that names another use is followed
