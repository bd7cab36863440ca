"""The same rows in every file format give the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.written_rows import POLARS, WRITERS
from training.utils.contracts.rows import ResponsesRow, SentenceRow

QUESTIONS = [
    {"question": "What is 2 + 3?", "answer": "5, of course"},
    {"question": 'Zwei\nZeilen, "quoted"; é中\U0001f600', "answer": " one\ttab"},
    {"question": "null", "answer": "NaN"},
]
PAIRS = [
    {"prompt": "Human: a? Assistant:", "chosen": " b", "rejected": " c"},
    {"prompt": "Human: d? Assistant:", "chosen": " e", "rejected": None},
    {"prompt": "Human: f? Assistant:", "chosen": " g", "rejected": " h"},
]


def called(name, arguments, **more):
    return {"role": "assistant", "tool_calls": [{**more, "function": {"name": name, "arguments": arguments}}]}


def tool(name, properties, **more):
    parameters = {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ADD = tool("add", {"a": {"type": "number"}, "b": {"type": "number"}}, required=["a", "b"])
RAIN = tool("rain", {"town": {"type": "string", "description": "Where.", "enum": ["Oslo", "Bergen"]}})
CALLS = [
    {
        "messages": [
            {"role": "user", "content": "Add 1 and 2."},
            called("add", {"a": 1, "b": 2}),
            {"role": "tool", "content": "3", "name": "add"},
            {"role": "assistant", "content": "3."},
        ],
        "tools": [ADD, RAIN],
    },
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Rain in Oslo?"},
            called("rain", {"town": "Oslo", "soon": True, "at": {"day": 7, "hours": [6, 18]}, "share": 0.5}),
            {"role": "assistant", "content": "Yes."},
        ],
        "tools": [RAIN],
    },
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
]
PROMPTS = [
    {"prompt": "1 + 1 =", "ground_truth": "2", "level": 3, "extra_info": {"index": 4, "tags": ["a", "b"]}},
    {"prompt": "1 + 2 =", "ground_truth": "3", "level": 5, "extra_info": {"source": "sums"}},
]
SHAPES = {"questions": (1, QUESTIONS), "pairs": (2, PAIRS), "calls": (1, CALLS), "prompts": (3, PROMPTS)}


def content(row):
    """The ids of a row, and of a prompt what it carries, without the name of its file and pandas' index."""
    if isinstance(row, SentenceRow):
        return [row.input_ids.tolist(), row.loss_mask.tolist()]
    if isinstance(row, ResponsesRow):
        return [row.prompt_ids.tolist(), [ids.tolist() for ids in row.response_ids]]
    carried = {name: value for name, value in row.columns.items() if name not in ("data_source", "__index_level_0__")}
    return [row.flipped_prompt_ids.tolist(), row.reference, carried]


@pytest.fixture
def built(build, form_tokenizer):
    def make(shape, address):
        style = "chat_template" if shape == "calls" else "human_assistant"
        made = build(
            SHAPES[shape][0], tokenizer=form_tokenizer, data_path=[address], max_seq_len=1024, prompt_style=style
        )
        return [content(row) for row in made.train]

    return make


def written(rows, writer, folder):
    """The rows in a file that the writer writes; its address."""
    write, address = {**WRITERS, **POLARS}[writer]
    address = address.format(folder / "rows")
    write(rows, Path(address.partition(":")[2] or address))
    return address


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("writer", [name for name in WRITERS if name != "JSON lines"])
def test_the_same_tokens(shape, writer, built, tmp_path):
    _, rows = SHAPES[shape]
    expected = built(shape, written(rows, "JSON lines", tmp_path))
    got = built(shape, written(rows, writer, tmp_path))
    if writer == "CSV" and shape == "prompts":  # whose columns are text
        expected, got = [row[:2] for row in expected], [row[:2] for row in got]
    assert len(expected) == len(rows) - (shape == "pairs") and got == expected


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("writer", POLARS)
def test_the_same_tokens_by_polars(shape, writer, built, tmp_path):
    pytest.importorskip("polars", reason="polars is not installed; its types are among the other writers'")
    test_the_same_tokens(shape, writer, built, tmp_path)
