"""What a source was taken for: format, why, columns read and not read; the log names what is not read once."""

from __future__ import annotations

import json

from tests.support.data_flags import raw_dataset_of, with_flags
from training.utils.data.build.build import build_phase
from training.utils.data.sources.recognition import Recognition

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


def test_a_class_decides_itself(flags):
    data = flags(data_path=["embedded"])
    assert raw_dataset_of("embedded", data, 1).get_recognition() is None
