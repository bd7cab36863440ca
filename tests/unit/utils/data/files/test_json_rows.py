"""Nulls with which `datasets` pads objects are left out of rows of JSON, and nulls that somebody wrote stay."""

from __future__ import annotations

import json

import pytest

from tests.support.written_rows import WRITERS
from training.utils.data.files import json_rows
from training.utils.data.files.json_rows import Padding, nulls_sentence
from training.utils.data.files.readers import open_rows

BARE = [
    {"m": [{"role": "x", "args": {"a": 1, "of": [None, {"d": 1}]}}, {"role": "y"}], "n": None},
    {"m": [{"role": "z", "args": {"a": 2, "c": "b", "of": [{"d": 2, "e": 3}]}}], "n": {"k": 1}},
]


def rows_of(tmp_path, rows, reader="jsonl"):
    path = tmp_path / f"rows.{reader}"
    path.write_text(json.dumps(rows) if reader == "json" else "".join(json.dumps(row) + "\n" for row in rows))
    return open_rows(reader, [str(path)], None)


@pytest.mark.parametrize("reader", ["jsonl", "json"])
def test_what_datasets_pads_is_read_as_it_was(tmp_path, reader):
    """A column's own null and nulls in lists stay."""
    WRITERS["datasets' to_json" + " as a list" * (reader == "json")][0](BARE, tmp_path / "rows")
    rows = open_rows(reader, [str(tmp_path / "rows")], None)
    assert list(rows) == BARE == list(rows)
    assert rows.nulls == {"args": 1, "c": 1, "e": 1}
    said = nulls_sentence(rows.nulls)
    assert said.startswith(
        "nulls are read as missing keys if all objects have the same keys, as `datasets` pads them: 1 '"
    )


@pytest.mark.parametrize("reader", ["jsonl", "json"])
@pytest.mark.parametrize(
    "arguments",
    [
        [{"a": None}, {"b": 1}],
        [{"a": None}, {}],
        [{"a": 1, "b": None}, {"b": 2, "a": 3}],
        [{"x": {"a": None}}, {"x": {"a": 1, "b": 2}}],
        [{"x": [{"a": None}, {"b": 1}]}],
    ],
)
def test_nulls_among_objects_with_different_keys_are_meant(tmp_path, reader, arguments):
    given = [{"calls": [{"arguments": each}]} for each in arguments]
    rows = rows_of(tmp_path, given, reader)
    assert list(rows) == given and not rows.nulls and nulls_sentence(rows.nulls) is None


def test_each_place_is_judged_for_itself_and_text_is_text(tmp_path):
    given = [{"m": {"a": None, "b": {"c": None}}, "n": '{"a": null}'}, {"m": {"a": 1, "b": {}}, "n": "null"}]
    read = [{"m": {"b": {"c": None}}, "n": '{"a": null}'}, {"m": {"a": 1, "b": {}}, "n": "null"}]
    assert list(rows_of(tmp_path, given)) == read


def test_keys_without_end_are_no_padding(monkeypatch):
    monkeypatch.setattr(json_rows, "_MOST_PLACES", 50)
    noted = Padding()
    rows = [{"m": {f"id{number}": {"x": None}}} for number in range(100)]
    for row in rows:
        noted.note(row)
    assert [noted.without(row) for row in rows] == rows and not noted.nulls
