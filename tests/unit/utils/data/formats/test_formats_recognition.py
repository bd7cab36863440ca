"""What a source was taken for: format, why, columns read and not read; the log names what is not read once."""

from __future__ import annotations

import json

import pytest

from tests.support.data_flags import raw_dataset_of, with_flags
from training.utils.data.build.build import build_phase
from training.utils.data.kinds.kind import CROSSED, GLUED
from training.utils.data.raw_dataset import Recognition

ROW = {"question": "Hi", "answer": "Ho", "topic": "greetings", "tags": ["a"], "score": 3, "hard": True}


def test_what_is_read_and_what_is_not(flags):
    data = flags([ROW])
    found = raw_dataset_of(data.source.data_path[0], data, 1).get_recognition()
    read = {"question": "prompt", "answer": "chosen"}
    assert found == Recognition("question_answer", "its columns", read, ("topic", "tags"), ("score", "hard"))
    assert found.sentence == (
        "read as question_answer because of its columns: prompt 'question', chosen 'answer'; not read: 'tags', 'topic'"
    )
    assert json.loads(json.dumps(found.as_json())) == found.as_json()


def test_flags_and_parts_of_columns(flags):
    rows = [{"extra_info": {"q": "Hi", "a": "Ho"}, "truth": "5", "weight": 1.0}]
    data = flags(rows, prompt_column="extra_info.q", chosen_column="extra_info.a", reference_column="truth")
    data = with_flags(data, margin_column="weight")
    found = raw_dataset_of(data.source.data_path[0], data, 1).get_recognition()
    read = {"extra_info.q": "prompt", "extra_info.a": "chosen", "weight": "margin", "truth": "reference"}
    assert found == Recognition("prompt_completion", "--prompt_column and --chosen_column", read)
    assert "not read" not in found.sentence


def test_the_log_names_it_for_a_build_and_for_a_cached_one(flags, tiny_tokenizer):
    data = flags([ROW] * 4, eval_fraction=0.0, data_split="1,0,0")
    logs: list[list[str]] = []
    for _ in range(2):
        lines: list[str] = []
        build_phase(1, data, tiny_tokenizer, 1, log=lines.append)
        logs.append([line for line in lines if "not read" in line])
    assert logs[0] == logs[1] and len(logs[0]) == 1 and logs[0][0].endswith("not read: 'tags', 'topic'")


@pytest.mark.needs_plugin("embedded")
def test_a_class_decides_itself(flags):
    data = flags(data_path=["embedded"])
    assert raw_dataset_of("embedded", data, 1).get_recognition() is None


def test_texts_that_meet_without_a_blank_are_counted(flags, tiny_tokenizer):
    """What `--prompt_column question --chosen_column answer` makes of questions and answers."""
    rows = [{"prompt": "What?", "completion": "5"}, {"prompt": "What? ", "completion": "5"}]
    rows += [{"prompt": "What?", "completion": " 5"}, {"prompt": "What?", "completion": "\n5"}]
    data = flags(rows, eval_fraction=0.0, data_split="1,0,0")
    report = build_phase(1, data, tiny_tokenizer, 1).report
    assert report.train.noted == {GLUED: 1, CROSSED: 1} and f"1 {GLUED}" in report.sentence
    asked = with_flags(data, data_format="question_answer", prompt_column="prompt", chosen_column="completion")
    assert build_phase(1, asked, tiny_tokenizer, 1).report.train.noted == {}


def test_trees_are_named(flags):
    rows = [{"message_id": "1", "parent_id": None, "role": "prompter", "text": "Hi", "lang": "en"}]
    rows += [{"message_id": "2", "parent_id": "1", "role": "assistant", "text": "Ho", "lang": "en"}]
    data = flags(rows)
    found = raw_dataset_of(data.source.data_path[0], data, 1).get_recognition()
    assert found.format == "messages" and found.texts_not_read == ("message_id", "parent_id", "lang")
    assert found.why == "conversation trees (2 messages, 1 of them answers, each with its prompt)"
    data = with_flags(data, text_column="text")  # a flag that names another use is followed
    assert raw_dataset_of(data.source.data_path[0], data, 1).get_recognition().format == "text"
