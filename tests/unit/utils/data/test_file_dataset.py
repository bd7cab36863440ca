"""Files as raw datasets: what each phase gets of them, what they carry, and what their phases lack."""

from __future__ import annotations

import datetime
import decimal
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from tests.support.data_flags import data_flags, raw_dataset_of
from tests.support.said import assistant, user
from training.utils.base.errors import ThreestepError
from training.utils.data import file_dataset
from training.utils.data.arguments import DataArguments
from training.utils.data.file_dataset import POINTER, FileDataset, look_at_data
from training.utils.data.registry import find_dataset

SHARED = Path(os.environ.get("THREESTEP_SHARED_DATA", Path(__file__).parents[6] / "shared" / "data"))

GOOD = {"prompt": "Human: hé? Assistant:", "chosen": " yes", "rejected": " no"}
HI, HO, NO = user("Hi"), assistant("Ho"), assistant("No")
VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [HI],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 3},
}


@pytest.fixture
def dataset(write_rows: Callable[..., str], flags: Callable[..., DataArguments]) -> Callable[..., FileDataset]:
    """The dataset behind rows, written as JSON lines, or behind an address."""

    def make(rows: list[dict[str, Any]] | str, **given: Any) -> FileDataset:
        name = rows if isinstance(rows, str) else f"jsonl:{write_rows(rows)}"
        return raw_dataset_of(name, flags(data_path=[name], **given), seed=1)

    return make


TOOLS = [{"type": "function", "function": {"name": "sing", "parameters": {}}}]
TALK = {"messages": [HI, HO, HI, NO], "tools": json.dumps([TOOLS[0]["function"]])}
TALK_PROMPT = f"Tools: {json.dumps(TOOLS)} Human: Hi Assistant: Ho Human: Hi Assistant:"
MESSAGES_PAIR = {"prompt": [HI], "chosen": [HO], "rejected": [NO]}
CARRIED = {"data_source": "openai/gsm8k", "ability": "math", "index": 3, "extra_info": {"split": "train", "index": 3}}
INFO = {"index": 3, "tools_kwargs": {"search": {"k": 2}}, "interaction_kwargs": {"name": "x"}, "need": True}
ASKED_FOR = {name: INFO[name] for name in INFO if name != "need"}
RANKED = {"prompt": "a", "k": [" b", " c", " d"]}
TOLD = {"messages": [HI], "chat_template_kwargs": {"enable_thinking": True, "style": "x"}, "enable_thinking": False}


@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        (GOOD, {}, {"prompt": GOOD["prompt"], "chosen": " yes", "rejected": " no", "messages": None, "extra": None,
                    "prompt_and_chosen": GOOD["prompt"] + " yes", "prompt_messages": None}),
        (TALK, {}, {"messages": TALK["messages"], "tools": TOOLS, "prompt_messages": [HI, HO, HI],
                    "chosen_messages": [NO], "prompt": TALK_PROMPT, "prompt_and_chosen": TALK_PROMPT + " No"}),
        (MESSAGES_PAIR, {}, {"messages": [HI, HO], "rejected_messages": [NO],
                             "prompt_and_rejected": "Human: Hi Assistant: No"}),
        # a conversation that the assistant begins has no prompt
        ({"messages": [HO]}, {}, {"prompt": None, "messages": [HO]}),
        ({"messages": []}, {}, {"prompt": None, "messages": []}),
        ({"messages": None}, {}, {"prompt": None, "messages": None}),
        (VERL, {}, {"prompt": "Human: Hi Assistant:", "prompt_messages": [HI], "reference": "72",
                    "extra": {**CARRIED, "reward_model": {"style": "rule"}}}),
        (VERL, {"reference_column": "extra_info.index"}, {"reference": 3, "extra": {**CARRIED, "reward_model":
                                                          VERL["reward_model"]}}),
        # what rewards ask for by name is taken out of verl's extra_info
        ({"prompt": "a", "extra_info": INFO}, {}, {"extra": {"extra_info": INFO, **ASKED_FOR}}),
        ({"prompt": "b", "index": 9, "extra_info": INFO}, {},
         {"extra": {"extra_info": INFO, **ASKED_FOR, "index": 9}}),
        # what a row tells the template
        ({"messages": [HI], "enable_thinking": False}, {}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (TOLD, {}, {"chat_template_kwargs": TOLD["chat_template_kwargs"], "extra": None}),
        ({"messages": [HI], "chat_template_kwargs": '{"style": "y"}'}, {}, {"chat_template_kwargs": {"style": "y"}}),
        ({"messages": [HI]}, {}, {"chat_template_kwargs": None}),
        (RANKED, {"responses_column": "k"}, {"responses": RANKED["k"], "chosen": " b"}),
        ({"prompt": "a", "k": [" b"]}, {"responses_column": "k"}, {"responses": None, "rejected": None}),
        # a margin is read where it is named
        ({**GOOD, "margin": 0.5}, {}, {"margin": None, "extra": {"margin": 0.5}}),
        ({**GOOD, "margin": 0.5}, {"margin_column": "margin"}, {"margin": 0.5, "extra": None}),
        ({**GOOD, "margin": None}, {"margin_column": "margin"}, {"margin": None}),
    ],
)  # fmt: skip
def test_what_a_row_says(dataset, row, columns, expected):
    raw = dataset([row], **columns)
    sample = raw.get_train_data()[0]
    assert {name: getattr(raw, f"get_{name}")(sample) for name in expected} == expected
    assert raw.get_eval_data() is None and raw.dataset_clean_name.startswith("jsonl_")


def test_keywords_of_a_template_that_are_none(dataset):
    raw = dataset([{"messages": [HI]}, {"messages": [HI], "chat_template_kwargs": [1]}])
    said = "rows.jsonl, line 2: column 'chat_template_kwargs': expected an object, g"
    with pytest.raises(ThreestepError, match=said):
        raw.get_chat_template_kwargs(raw.get_train_data()[1])


def test_what_else_a_row_carries_is_json(tmp_path, dataset):
    row = {
        **{"prompt": "a", "when": datetime.date(2024, 1, 2), "cost": decimal.Decimal("1.5"), "none": None},
        "picture": {"bytes": b"\x89", "path": "a.png"},
        "list": [1, 2.5, True],
    }
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
    raw = dataset(f"parquet:{tmp_path}/rows.parquet")
    extra = raw.get_extra(raw.get_train_data()[0])
    assert extra == {"when": "2024-01-02", "cost": "1.5", "picture": {"path": "a.png"}, "list": [1, 2.5, True]}
    assert json.loads(json.dumps(extra)) == extra


def test_a_folder_with_files_for_evaluation(tmp_path, dataset):
    for name, count in (("train-0.jsonl", 3), ("train-1.jsonl", 2), ("test.jsonl", 1)):
        (tmp_path / name).write_text((json.dumps(GOOD) + "\n") * count)
    raw = dataset(f"jsonl:{tmp_path}")
    assert len(raw.get_train_data()) == 5 and len(raw.get_eval_data()) == 1
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "a", "answer": "b"}) + "\n")
    with pytest.raises(ThreestepError, match="--data_format preference expects the columns prompt, chosen, rejected"):
        dataset(f"jsonl:{tmp_path}").check_phase(1)


def test_the_fingerprint_is_the_files_content(write_rows, dataset):
    first, same = write_rows([GOOD], "first.jsonl"), write_rows([GOOD], "moved.jsonl")
    other = write_rows([{**GOOD, "chosen": " yas"}], "other.jsonl")
    found = [dataset(f"jsonl:{path}").get_fingerprint() for path in (first, same, other)]
    assert found[0] == found[1] != found[2]


# --- what a phase needs


@pytest.mark.needs_plugin("pretraining_loss")
@pytest.mark.parametrize(
    ("row", "columns", "phase", "fragment"),
    [
        (VERL, {}, 1, "step 1 needs responses, but the columns are 'ability', 'data_source', .*read as prompt_only"),
        (VERL, {}, 2, "step 2 needs responses, .*; name the response column with --chosen_column"),
        ({"text": "a"}, {}, 2, "step 2 needs prompts, but this is plain text; pass it as --sft_only_data_path"),
        ({"text": "a"}, {}, 3, "step 3 needs prompts, but this is plain text; .* --unsupervised_dataset_name"),
        (GOOD, {"rejected_column": "worse"}, 2, "no column 'worse'; .*'rejected'; name the .* with --rejected_column"),
        (GOOD, {"chosen_column": "good"}, 1, "no column 'good'; .*name the right one with --chosen_column"),
        (GOOD, {"margin_column": "sure"}, 2, "no column 'sure'; .*name the right one with --margin_column"),
        (GOOD, {"reference_column": "truth"}, 3, "no column 'truth'; .*name the right one with --reference_column"),
    ],
)
def test_what_a_phase_lacks(dataset, row, columns, phase, fragment):
    raw = dataset([row], **columns)
    with pytest.raises(ThreestepError, match=f"rows.jsonl: {fragment}"):
        raw.check_phase(phase)


def test_what_a_phase_does_not_need_may_be_missing(dataset):
    dataset([VERL]).check_phase(3)
    dataset([{"text": "a"}]).check_phase(1)
    dataset([{"prompt": "a", "chosen": " b"}]).check_phase(2)  # its rows are dropped and counted
    dataset([GOOD], rejected_column="worse").check_phase(1)
    dataset([GOOD], reference_column="truth").check_phase(2)
    dataset([GOOD], margin_column="sure").check_phase(1)


def test_other_columns_are_another_build(build, tiny_tokenizer):
    rows = [{"prompt": "a", "chosen": " b", "other": " c"}] * 4
    built, other = build(1, rows), build(1, rows, chosen_column="other")
    texts = [tiny_tokenizer.decode(made.train[0].input_ids) for made in (built, other)]
    assert texts == ["a b<|endoftext|>", "a c<|endoftext|>"] and not other.report.from_cache


# --- the data of the field


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"the published files are not at {SHARED}")
@pytest.mark.parametrize(
    ("address", "phases", "rows"),
    [
        ("json:chat/glaive_toolcall_en_demo.json", (1, 3), 300),
        ("json:preference/dpo_en_demo.json", (1, 2, 3), 300),
        ("json:preference/dpo_zh_demo.json", (1, 2, 3), 300),
        ("jsonl:unsupervised/c4_demo.jsonl", (1,), 300),
        ("jsonl:gsm8k/train.jsonl", (1, 3), 7473),
    ],
)
def test_the_published_files_need_no_flag(build, address, phases, rows):
    reader, _, path = address.partition(":")
    most = {"max_seq_len": 4096, "max_prompt_seq_len": 4096, "data_path": [f"{reader}:{SHARED / path}"]}
    for phase in phases:
        limit = 100 if rows > 300 and phase != 1 else None
        report = build(phase, [], max_train_rows=limit, **most).report.train
        assert report.rows + sum(report.dropped.values()) == min(rows, limit or rows)
        assert set(report.dropped) <= {"response_cut_to_nothing", "prompt_too_long"}


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"the published files are not at {SHARED}")
def test_tool_calls_of_the_published_conversations(dataset):
    raw = dataset(f"json:{SHARED}/chat/glaive_toolcall_en_demo.json")
    found = [raw.get_messages(sample) for sample in raw.get_train_data()]
    calls = [call for said in found for message in said for call in message.get("tool_calls", ())]
    assert len(calls) > 100 and all(isinstance(call["function"]["arguments"], dict) for call in calls)
    assert {message["role"] for said in found for message in said} == {"user", "assistant", "tool"}
    assert sum(raw.get_tools(sample) is not None for sample in raw.get_train_data()) > 100


def look(name: str, phase: int = 1, **flags) -> None:
    look_at_data(phase, data_flags(data_path=[name], **flags).source)


def test_a_file_that_cannot_serve(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "a", "answer": "b"}) + "\n")
    look(str(path))
    with pytest.raises(ThreestepError, match=f"no column 'Question'; .*did you mean 'question'.*{POINTER}$"):
        look(str(path), prompt_column="Question", chosen_column="answer")
    path.write_text('{"text": "a"}\n')
    with pytest.raises(ThreestepError, match="step 2 needs prompts, but this is plain text"):
        look(str(path), phase=2)


@pytest.mark.needs_plugin("embedded")
def test_data_for_the_first_step_alone(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    flags = data_flags(data_path=["embedded"], sft_only_data_path=[str(tmp_path / "rows.jsonl")]).source
    look_at_data(1, flags)
    look_at_data(2, flags)
    (tmp_path / "rows.jsonl").write_text("{")
    look_at_data(2, flags)
    with pytest.raises(ThreestepError, match="line 1: expected one JSON object"):
        look_at_data(1, flags)


def test_large_files_are_read_once(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("{")
    monkeypatch.setattr(file_dataset, "_MOST_BYTES", 0)
    look(str(tmp_path / "rows.jsonl"))


@pytest.mark.needs_plugin("embedded")
def test_the_hub_is_asked_for_its_datasets_alone(monkeypatch):
    asked = []
    monkeypatch.setattr(file_dataset, "check_hub", lambda *words: asked.append(words))
    look("embedded")
    monkeypatch.setattr(find_dataset("embedded"), "is_on_hub", True)
    look("embedded")
    assert [words[1:] for words in asked] == [("datasets", "embedded")]
