"""Local files: rows as stored, and one error with file and line for a row that is wrong."""

from __future__ import annotations

import json

import pytest

from training.utils.data.readers import Columns, JsonLines, JsonList, LocalFileDataset
from training.utils.run.errors import ThreestepError

GOOD = {"prompt": "Human: hé? Assistant:", "chosen": " yes", "rejected": " no"}
REQUIRED = {"prompt": "prompt_column"}
TEXTS = ("prompt", "chosen", "rejected")


def lines(path: str) -> JsonLines:
    return JsonLines(path, REQUIRED, TEXTS)


def test_json_lines_in_any_order(write_rows):
    rows = lines(write_rows([{**GOOD, "chosen": f" {i}"} for i in range(5)]))
    assert len(rows) == 5 and rows[4]["chosen"] == " 4" and rows[0] == {**GOOD, "chosen": " 0"}
    assert rows.columns == {"prompt", "chosen", "rejected"}


def test_blank_lines_and_a_byte_order_mark_are_passed_over(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n\n  \n" + json.dumps(GOOD).encode())
    rows = lines(str(path))
    assert [rows[0], rows[1]] == [GOOD, GOOD] and len(rows) == 2


@pytest.mark.parametrize(
    ("bad", "fragment"),
    [
        ("{not json", "expected one JSON object, got text that is not JSON"),
        ('{"prompt": "cut off', "got text that is not JSON"),
        ('["prompt", "chosen"]', "expected a JSON object, got a list"),
        ('"prompt"', "expected a JSON object, got text"),
        ("7", "expected a JSON object, got a number"),
        ("true", "expected a JSON object, got a truth value"),
        ("null", "expected a JSON object, got null"),
        (
            '{"question": "?"}',
            "no column 'prompt'; the row has 'question'; name the right one with --prompt_column",
        ),
        ('{"prompt": 5}', "column 'prompt': expected text, got a number"),
        ('{"prompt": "a", "chosen": ["b"]}', "column 'chosen': expected text, got a list"),
        ('{"prompt": "a", "rejected": {"b": 1}}', "column 'rejected': expected text, got an object"),
        ('{"prompt": "a", "rejected": false}', "column 'rejected': expected text, got a truth value"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(write_rows, bad, fragment):
    path = write_rows([GOOD, GOOD, bad, GOOD])
    with pytest.raises(ThreestepError) as caught:
        lines(path)
    assert str(caught.value).startswith(f"{path}, line 3: ") and fragment in str(caught.value)


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(ThreestepError, match="line 2: expected UTF-8 text"):
        lines(str(path))


def test_null_is_an_absent_text(write_rows):
    assert lines(write_rows([{**GOOD, "rejected": None}]))[0]["rejected"] is None


def write_list(tmp_path, text: str) -> str:
    path = tmp_path / "rows.json"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_json_list(tmp_path):
    rows = JsonList(write_list(tmp_path, json.dumps([GOOD, GOOD], indent=2)), REQUIRED, TEXTS)
    assert len(rows) == 2 and rows[1] == GOOD and rows.columns == set(GOOD)
    assert len(JsonList(write_list(tmp_path, " [ ] "), REQUIRED, TEXTS)) == 0


@pytest.mark.parametrize(
    ("text", "line", "fragment"),
    [
        ('{"prompt": "a"}', 1, "expected one JSON list of objects"),
        ('[\n{"prompt": "a"},\n\n7\n]', 4, "expected a JSON object, got a number"),
        ('[\n{"prompt": "a"},\n{"question": "a"}]', 3, "no column 'prompt'"),
        ('[\n{"prompt": "a"},\n{"prompt": 3}]', 3, "column 'prompt': expected text, got a number"),
        ('[\n{"prompt": "a"},\n{"prompt": }]', 3, "not JSON"),
        ('[\n{"prompt": "a"}\n{"prompt": "b"}]', 3, "breaks off or lacks a comma"),
        ('[\n{"prompt": "a"}', 2, "breaks off or lacks a comma"),
    ],
)
def test_a_malformed_item_of_a_list_is_named_by_file_and_line(tmp_path, text, line, fragment):
    path = write_list(tmp_path, text)
    with pytest.raises(ThreestepError) as caught:
        JsonList(path, REQUIRED, TEXTS)
    assert str(caught.value).startswith(f"{path}, line {line}: ") and fragment in str(caught.value)


def reader(path: str, columns: Columns | None = None) -> LocalFileDataset:
    return LocalFileDataset(f"jsonl:{path}", "jsonl", path, columns or Columns())


def test_texts_are_taken_as_stored(write_rows):
    raw = reader(write_rows([GOOD]))
    sample = raw.get_train_data()[0]
    assert (raw.get_prompt(sample), raw.get_chosen(sample), raw.get_rejected(sample)) == tuple(GOOD.values())
    assert raw.get_prompt_and_chosen(sample) == GOOD["prompt"] + GOOD["chosen"]
    assert raw.get_eval_data() is None and raw.dataset_clean_name.startswith("jsonl_")


def test_columns_by_other_names(write_rows):
    raw = reader(write_rows([{"q": "Q:", "a": " A", "b": " B"}]), Columns("q", "a", "b"))
    sample = raw.get_train_data()[0]
    assert raw.get_prompt_and_rejected(sample) == "Q: B"
    raw.check_phase(2)


def test_a_row_without_a_response_gives_none(write_rows):
    raw = reader(write_rows([{"prompt": "a"}, GOOD]))
    sample = raw.get_train_data()[0]
    assert raw.get_chosen(sample) is None and raw.get_prompt_and_chosen(sample) is None


def test_a_missing_column_names_the_flag(write_rows):
    raw = reader(write_rows([{"prompt": "a", "answer": " b"}]))
    raw.check_phase(3)
    for phase in (1, 2):
        with pytest.raises(ThreestepError, match=f"phase {phase} needs the column 'chosen'.*'answer', 'prompt'") as e:
            raw.check_phase(phase)
        assert "--chosen_column" in str(e.value)


def test_a_rejected_column_that_was_asked_for_must_be_there(write_rows):
    path = write_rows([{"prompt": "a", "chosen": " b"}])
    reader(path).check_phase(2)
    with pytest.raises(ThreestepError, match="needs the column 'worse'.*--rejected_column"):
        reader(path, Columns(rejected="worse")).check_phase(2)


def test_a_margin_column_is_read_where_it_is_named(write_rows):
    path = write_rows([{**GOOD, "margin": 0.5}, GOOD])
    assert reader(path).get_margin(reader(path).get_train_data()[0]) is None
    raw = reader(path, Columns(margin="margin"))
    assert [raw.get_margin(raw.get_train_data()[row]) for row in (0, 1)] == [0.5, None]
    raw.check_phase(2)


def test_a_margin_column_that_was_asked_for_must_be_there_in_phase_2(write_rows):
    raw = reader(write_rows([GOOD]), Columns(margin="how_sure"))
    raw.check_phase(1)
    with pytest.raises(ThreestepError, match="phase 2 needs the column 'how_sure'.*--margin_column"):
        raw.check_phase(2)


def test_the_fingerprint_is_the_files_content(write_rows):
    first, same = write_rows([GOOD], "first.jsonl"), write_rows([GOOD], "moved.jsonl")
    other = write_rows([{**GOOD, "chosen": " yas"}], "other.jsonl")
    assert reader(first).get_fingerprint() == reader(same).get_fingerprint() != reader(other).get_fingerprint()
