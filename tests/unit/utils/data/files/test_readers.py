"""Local and remote files: rows as stored, and one error with file and line for a row that is wrong.

Which files are read, by their names and content, is in `tests/support/form_table.py` too.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests.support.written_rows import WRITERS
from training.utils.base.errors import ThreestepError
from training.utils.data.files.columns import Expected
from training.utils.data.files.readers import files_of, open_rows, split_reader, why_no_dataset
from training.utils.data.registry import find_dataset

GOOD = {"prompt": "Human: hé? Assistant:", "chosen": " yes", "rejected": " no"}
EXPECTED = Expected({"prompt": "prompt_column"}, ("prompt", "chosen", "rejected"))


def rows_at(address: str, spool_dir: Path | None = None):
    reader, path = split_reader(address)
    return open_rows(reader, files_of(reader, path, "data_path"), None if spool_dir is None else str(spool_dir))


def refused(tmp_path: Path, name: str, content: str | bytes, expected: Expected | None = None) -> str:
    """What is said of a file with this content."""
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ThreestepError) as caught:
        open_rows(name.partition(".")[2], [str(path)], None, expected)
    return str(caught.value).removeprefix(f"{path}, ").removeprefix(str(path))


def test_blank_lines_a_byte_order_mark_and_null(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(
        b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n\n  \n" + json.dumps({**GOOD, "rejected": None}).encode()
    )
    rows = open_rows("jsonl", [str(tmp_path / "rows.jsonl")], None, EXPECTED)
    assert [rows[1], rows[0]] == [{**GOOD, "rejected": None}, GOOD] and len(rows) == 2 and set(rows.kinds) == set(GOOD)


OVER_LINES = (
    "expected one JSON object per line, got one that spans several lines; write each row on its own line, as jq"
)


@pytest.mark.parametrize(
    ("bad", "fragment"),
    [
        ("{not json", "expected one JSON object, got text that is not JSON"),
        ('{"prompt": "cut off', "got text that is not JSON"),
        ("# rows", "expected one JSON object, got text that is not JSON"),
        ('["prompt", "chosen"]', "expected a JSON object, got a list"),
        ('"prompt"', "expected a JSON object, got text"),
        ("7", "expected a JSON object, got a number"),
        ("true", "expected a JSON object, got a truth value"),
        ("null", "expected a JSON object, got null"),
        ('{"question": "?"}', "no column 'prompt'; the row has 'question'; name the right one with --prompt_column"),
        ('{"prompt": 5}', "column 'prompt': expected text, got a number"),
        ('{"prompt": "a", "chosen": ["b"]}', "column 'chosen': expected text, got a list"),
        ('{"prompt": "a", "rejected": {"b": 1}}', "column 'rejected': expected text, got an object"),
        ('{"prompt": "a", "rejected": false}', "column 'rejected': expected text, got a truth value"),
        (b'{"prompt": "\xff"}', "expected UTF-8 text"),
        (json.dumps(GOOD, indent=2), OVER_LINES),
        ('{"prompt": "a"},', "expected one JSON object per line, got more text at column 16: ','"),
        ('{"prompt": "a"}{"prompt": "b"}', "expected one JSON object per line, got more text at column 16: '{"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path, bad, fragment):
    line = bad if isinstance(bad, bytes) else bad.encode()
    said = refused(tmp_path, "rows.jsonl", json.dumps(GOOD).encode() + b"\n\n" + line + b"\n", EXPECTED)
    assert said.startswith("line 3: ") and fragment in said


@pytest.mark.parametrize(
    ("text", "line", "fragment"),
    [
        ('{"prompt": "a"}', 1, "expected one JSON list of objects"),
        ('[\n{"prompt": "a"},\n\n7\n]', 4, "expected a JSON object, got a number"),
        ('[\n{"prompt": "a"},\n{"question": "a"}]', 3, "no column 'prompt'"),
        ('[\n{"prompt": "a"},\n{"prompt": 3}]', 3, "column 'prompt': expected text, got a number"),
        ('[\n{"prompt": "a"},\n{"prompt": }]', 3, "not JSON"),
        ('[\n{"prompt": "a"}\n{"prompt": "b"}]', 3, "is cut off or lacks a comma"),
        ('[\n{"prompt": "a"}', 2, "is cut off or lacks a comma"),
        ('[{"prompt": "a"}]\n[]', 2, "expected nothing after the JSON list, got '[]'"),
    ],
)
def test_a_malformed_item_of_a_list_is_named_by_file_and_line(tmp_path, text, line, fragment):
    said = refused(tmp_path, "rows.json", text, EXPECTED)
    assert said.startswith(f"line {line}: ") and fragment in said


# --- every reader gives the same rows

ROWS = [
    {"prompt": "Human: hé? Assistant:", "chosen": ' yes,\n"so"', "rejected": None},
    {"prompt": "二", "chosen": " 是" * 80_000, "rejected": " no"},
    {"prompt": "3", "chosen": " 4", "rejected": " 5"},
]
EVERY_WAY = ("JSON lines", "JSON lines, compressed, without saying so", "a JSON list", "CSV", "Parquet",
             "Parquet of one row a group", "an Arrow file", "an Arrow stream of polars' types")  # fmt: skip


@pytest.mark.parametrize("writer", EVERY_WAY)
def test_every_reader_gives_the_same_rows_of_local_and_remote_files(tmp_path, writer):
    """In any order, with the kinds of their values and where each stands."""
    write, form = WRITERS[writer]
    reader, path = split_reader(form.format(tmp_path / "rows"))
    write(ROWS, Path(path))
    rows = rows_at(f"{reader}:{path}", tmp_path / "spool")
    assert list(rows) == ROWS and [rows[2], rows[0]] == [ROWS[2], ROWS[0]]
    assert {column: set(kinds) for column, kinds in rows.kinds.items()} == {column: {"text"} for column in GOOD}
    assert os.path.basename(rows[2].where).startswith("rows.")
    with pytest.raises(IndexError):
        rows[3]
    assert not [*(tmp_path / "spool").glob("*")]  # no copy is left
    memory = fsspec.filesystem("memory")
    memory.pipe(f"/remote/{os.path.basename(path)}", Path(path).read_bytes())
    assert list(rows_at(f"{reader}:memory://remote/{os.path.basename(path)}")) == ROWS
    memory.store.clear()


@pytest.mark.parametrize("reader", ["jsonl", "json"])
@pytest.mark.parametrize(
    "content",
    [
        *(ends.join(json.dumps(row) for row in ROWS[1:]) for ends in ("\n", "\r\n", "\r")),
        "\r\r" + "\r".join(json.dumps(row) for row in ROWS[1:]) + "\r",
        json.dumps(ROWS[1:]),
        json.dumps(ROWS[1:], indent=2),
        json.dumps({"version": "[1]", "data": ROWS[1:], "more": {"a": "}"}}, indent=2),
    ],
    ids=["LF", "CRLF", "CR", "blank lines", "list", "list over lines", "object with a list"],
)
def test_every_layout_of_json_that_means_one_thing(tmp_path, reader, content):
    (tmp_path / f"rows.{reader}").write_text(content, newline="")
    assert list(rows_at(f"{reader}:{tmp_path}/rows.{reader}")) == ROWS[1:]


def test_shards_are_one_sequence(tmp_path):
    for number in range(3):
        lines = [json.dumps({"n": 2 * number + n}) + "\n" for n in range(0 if number == 1 else 2)]
        (tmp_path / f"part-{number}.jsonl").write_text("".join(lines))
    rows = rows_at(f"jsonl:{tmp_path}/part-*.jsonl")
    assert [row["n"] for row in rows] == [0, 1, 4, 5]
    assert rows[3].where == f"{tmp_path}/part-2.jsonl, line 2"
    with pytest.raises(IndexError, match="row 4 of 4"):
        rows[4]


def test_where_a_row_stands(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    (tmp_path / "rows.json").write_text('[{"a": 1},\n\n{"a":\n 2}, {"a": 3}]')
    (tmp_path / "rows.csv").write_text('a\n"1\n1"\n\n2\n')
    assert rows_at(f"jsonl:{tmp_path}/rows.jsonl")[1].where == f"{tmp_path}/rows.jsonl, line 3"
    assert [row.where[-6:] for row in rows_at(f"json:{tmp_path}/rows.json")] == ["line 1", "line 3", "line 4"]
    assert [row.where[-6:] for row in rows_at(f"csv:{tmp_path}/rows.csv")] == ["line 2", "line 5"]


def test_the_first_place_of_every_kind_of_value(tmp_path):
    rows = ['{"a": "x", "b": null}', '{"a": 1, "c": [1]}', '{"a": "y", "c": {}, "b": true}', '{"a": 2.5}']
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    kinds = rows_at(f"jsonl:{tmp_path}/rows.jsonl").kinds
    at = f"{tmp_path}/rows.jsonl, line "
    assert kinds["a"] == {"text": f"{at}1", "a number": f"{at}2"}
    assert kinds["b"] == {"a truth value": f"{at}3"}
    assert kinds["c"] == {"a list": f"{at}2", "an object": f"{at}3"}


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("a.csv", b"", " is empty: expected a first line with the column names"),
        ("a.csv", b"p,q\n1,2\n3\n", "line 3: expected 2 values ('p', 'q'), got 1; a value with a delimiter"),
        ("a.csv", b"p,q\n1,2,3\n", "line 2: expected 2 values ('p', 'q'), got 3"),
        ("a.csv", b"p,p\n1,2\n", "line 1: two columns share a name: p, p"),
        ("a.csv", b'p,q\n1,"2\n', "line 2: expected comma-separated values: unexpected end of data"),
        ("a.csv", b"p,q\n1,\xff\n", "line 1 or after: expected UTF-8 text: invalid start byte"),
        ("a.parquet", b"nothing of the kind", ": expected a Parquet file: "),
        ("a.parquet", b"", ": expected a Parquet file: "),
        ("a.arrow", b"nothing of the kind", ": expected an Arrow file or stream: "),
        ("a.arrow", b"", ": expected an Arrow file or stream: "),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, fragment):
    assert refused(tmp_path, name, content).startswith(fragment)


@pytest.mark.parametrize("row", [{"naïve": "a"}, {"x": {"naïve": "a"}}])
def test_names_that_are_no_utf8_are_a_sentence(tmp_path, row):
    for reader, writer in (("parquet", "Parquet"), ("arrow", "an Arrow file")):
        path = tmp_path / f"a.{reader}"
        WRITERS[writer][0]([row], path)
        path.write_bytes(path.read_bytes().replace("naïve".encode(), b"na\xe2\xafve"))
        with pytest.raises(ThreestepError, match=f"a.{reader}: expected .*: .*invalid continuation byte"):
            rows_at(f"{reader}:{path}")[0]


@pytest.mark.parametrize("reader", ["csv", "parquet"])
def test_what_is_expected_of_columns(tmp_path, reader):
    (tmp_path / "rows.csv").write_text("n,text\n1,a\n")
    parquet.write_table(pyarrow.table({"n": [1], "text": ["a"]}), tmp_path / "rows.parquet")
    path = str(tmp_path / f"rows.{reader}")
    assert len(open_rows(reader, [path], None, Expected({"text": "text_column"}, ("text",)))) == 1
    with pytest.raises(ThreestepError, match="no column 'body'; the file has 'n', 'text'; name the .* --text_column"):
        open_rows(reader, [path], None, Expected({"body": "text_column"}))
    if reader == "parquet":
        with pytest.raises(ThreestepError, match="rows.parquet: column 'n': expected text, got a number"):
            open_rows(reader, [path], None, Expected((), ("n",)))


def test_rows_are_read_from_several_threads_at_once(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(2000)))
    rows = rows_at(f"jsonl:{tmp_path}/rows.jsonl")
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda n: rows[n]["n"], range(2000))) == list(range(2000))


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ('"\\ud800"', r"expected text, got .ud800, half of a surrogate pair"),
        ("[" * 100_000, "expected (one|a) JSON object, got one that cannot be read: .*recursion"),
        ("9" * 5000, "expected (one|a) JSON object, got one that cannot be read: .*digits"),
    ],
    ids=["half a pair", "deep", "many digits"],
)
def test_json_that_nobody_can_use(tmp_path, value, sentence):
    line = '{"prompt": ' + value + "}"
    for name, content in (("jsonl", "{}\n" + line), ("json", "[{},\n" + line + "]")):
        path = tmp_path / f"rows.{name}"
        path.write_text(content)
        with pytest.raises(ThreestepError, match=f"rows.{name}, line 2: {sentence}"):
            open_rows(name, [str(path)], None)
    path.with_suffix(".jsonl").write_text('{"prompt": "\\ud83d\\ude00 \\\\ud800"}\n')  # a whole pair, and text
    assert rows_at(f"jsonl:{path.with_suffix('.jsonl')}")[0]["prompt"] == "\U0001f600 \\ud800"


def test_a_damaged_arrow_file_is_no_crash(tmp_path):
    """Its offsets point outside: to read the row would end the process."""
    path = tmp_path / "rows.arrow"
    WRITERS["an Arrow file"][0]([{"prompt": "first"}, {"prompt": "second"}], path)
    content = path.read_bytes()
    offsets = np.array([0, 5, 11], np.int32).tobytes()  # where each text begins, and the last one's end
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, np.array([0, 5, 2**30], np.int32).tobytes()))
    with pytest.raises(ThreestepError, match="rows.arrow: expected an Arrow file or stream: .*offsets"):
        open_rows("arrow", [str(path)], None)


# --- names that no reader takes


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("csv:a/b.csv", ("csv", "a/b.csv")),
        ("parquet:s3://bucket/a", ("parquet", "s3://bucket/a")),
        ("embedded", None),
        ("tsv:a", None),
        ("json", None),
    ],
)
def test_readers_by_name(name, found):
    assert split_reader(name) == found
    assert why_no_dataset("owner/name") is None and why_no_dataset("enbedded") is None


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("/nowhere/rows", "'/nowhere/rows' does not exist; the current folder is '"),
        ("rows.xlsx", "'rows.xlsx' is a spreadsheet; save the sheet as CSV UTF-8"),
        ("rows.pkl.gz", "'rows.pkl.gz' is a pickle, which may run code"),
        ("mine.py", "is Python code; pass it as --dataset_module, and the name that it registers as --data_path"),
    ],
)
def test_a_stranger_by_its_name(name, sentence):
    with pytest.raises(ThreestepError) as caught:
        find_dataset(name)
    assert str(caught.value).startswith("--data_path: ") and sentence in str(caught.value)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ([], "is empty; pass a folder or a file with rows"),
        (["config.json"], "holds a model, not data; pass it as --model_name_or_path"),
        (["a.csv", "b.csv.gz", "c.parquet"], "holds files (2 .csv, 1 .parquet); pass it as parquet:{0} or csv:{0}"),
        (["a.json"], "holds files (1 .json); pass it as json:{0}"),
        (["a.png"], "holds no readable file (1 .png); pass a folder of data files as jsonl:PATH"),
    ],
)
def test_a_stranger_by_the_content_of_its_folder(tmp_path, files, sentence):
    for name in files:
        (tmp_path / name).write_text("")
    assert sentence.format(tmp_path) in (why_no_dataset(str(tmp_path)) or "")
