"""JSON lines and lists: rows in every layout, without nulls in objects; one error that names the cause."""

from __future__ import annotations

import json

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.data.files.readers import open_rows

ROWS = [{"question": "Hi", "answer": "Ho"}, {"question": "So", "answer": "No"}]
LINES = [json.dumps(row) for row in ROWS]
OVER_LINES = "expected one JSON object per line, got one over several lines; write each row on a line of its own, as jq"


def rows_of(tmp_path, content: str, reader: str = "jsonl"):
    path = tmp_path / f"rows.{reader}"
    path.write_text(content, newline="")
    return open_rows(reader, [str(path)], None)


@pytest.mark.parametrize("reader", ["jsonl", "json"])
@pytest.mark.parametrize(
    "content",
    [
        "\n".join(LINES),
        "\r\n".join(LINES),
        "\r".join(LINES),
        "\r\r" + "\r".join(LINES) + "\r",
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2),
        json.dumps({"version": 1, "data": ROWS}, indent=2),
    ],
)
def test_every_layout_that_means_one_thing(tmp_path, reader, content):
    rows = rows_of(tmp_path, content, reader)
    assert list(rows) == ROWS
    assert set(rows.kinds) == {"question", "answer"}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("\n".join(json.dumps(row, indent=2) for row in ROWS), f"line 1: {OVER_LINES}"),
        (json.dumps(ROWS[0], indent=2), f"line 1: {OVER_LINES}"),
        (f"{LINES[0]}\n{json.dumps(ROWS[1], indent=2)}\n", f"line 2: {OVER_LINES}"),
        (
            f"{LINES[0]},\n{LINES[1]}\n",
            "line 1: expected one JSON object per line, got more behind it at column 35: ','",
        ),
        (LINES[0] + LINES[1], "line 1: expected one JSON object per line, got more behind it at column 35: '{"),
        (f"# rows\n{LINES[0]}\n", "line 1: expected one JSON object, got text that is not JSON"),
        ('{"question": "Hi\n', "line 1: expected one JSON object, got text that is not JSON"),
    ],
)
def test_a_layout_that_is_refused_is_named(tmp_path, content, sentence):
    with pytest.raises(ThreestepError) as caught:
        rows_of(tmp_path, content)
    assert sentence in str(caught.value)
