"""Local files: rows as stored, and one error with file and line for a row that is wrong."""

from __future__ import annotations

import gzip
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pytest

from training.utils.base.errors import ThreestepError
from training.utils.data.files.columns import Expected
from training.utils.data.files.json_rows import JsonLines, JsonList
from training.utils.data.files.readers import files_of, open_rows, split_reader

GOOD = {"prompt": "Human: hé? Assistant:", "chosen": " yes", "rejected": " no"}
EXPECTED = Expected({"prompt": "prompt_column"}, ("prompt", "chosen", "rejected"))


def lines(path: str) -> JsonLines:
    return JsonLines(path, EXPECTED)


def test_json_lines_in_any_order(write_rows):
    rows = lines(write_rows([{**GOOD, "chosen": f" {i}"} for i in range(5)]))
    assert len(rows) == 5 and rows[4]["chosen"] == " 4" and rows[0] == {**GOOD, "chosen": " 0"}
    assert set(rows.kinds) == set(GOOD)


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
    rows = JsonList(write_list(tmp_path, json.dumps([GOOD, GOOD], indent=2)), EXPECTED)
    assert len(rows) == 2 and rows[1] == GOOD and set(rows.kinds) == set(GOOD)
    assert len(JsonList(write_list(tmp_path, " [ ] "), EXPECTED)) == 0


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
        JsonList(path, EXPECTED)
    assert str(caught.value).startswith(f"{path}, line {line}: ") and fragment in str(caught.value)


# --- every reader gives the same rows

ROWS = [
    {"prompt": "Human: hé? Assistant:", "chosen": ' yes,\n"so"', "rejected": None},
    {"prompt": "二", "chosen": " 是" * 80_000, "rejected": " no"},
    {"prompt": "3", "chosen": " 4", "rejected": " 5"},
]


def write_every_way(folder: Path) -> list[str]:
    """The rows as files of every kind, each in a folder of its own; their addresses."""
    import csv

    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    lines = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    table = pyarrow.Table.from_pylist(ROWS)
    for name in ("jsonl", "gz", "json", "csv", "tsv", "parquet", "arrow", "stream"):
        (folder / name).mkdir(parents=True)
    (folder / "jsonl" / "rows.jsonl").write_bytes(lines)
    (folder / "gz" / "rows.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "json" / "rows.json").write_text(json.dumps(ROWS, indent=1))
    for name, delimiter in (("csv", ","), ("tsv", "\t")):
        with open(folder / name / f"rows.{name}", "w", newline="", encoding="utf-8-sig") as file:
            writer = csv.DictWriter(file, ROWS[0], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(ROWS)
    pyarrow.parquet.write_table(table, folder / "parquet" / "rows.parquet", row_group_size=2)
    with pyarrow.ipc.new_file(str(folder / "arrow" / "rows.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=1)
    with pyarrow.ipc.new_stream(str(folder / "stream" / "rows.arrow"), table.schema) as file:
        file.write_table(table)
    readers = {"gz": "jsonl", "tsv": "csv", "stream": "arrow"}
    return [f"{readers.get(place.name, place.name)}:{place}" for place in sorted(folder.iterdir())]


def rows_at(address: str, spool_dir: Path | None = None):
    reader, path = split_reader(address)
    return open_rows(reader, files_of(reader, path, "data_path"), None if spool_dir is None else str(spool_dir))


def test_every_reader_gives_the_same_rows(tmp_path):
    addresses = write_every_way(tmp_path / "files")
    assert len(addresses) == 8
    for address in addresses:
        rows = rows_at(address, tmp_path / "spool")
        assert list(rows) == ROWS, address
        assert rows[2] == ROWS[2] and rows[0] == ROWS[0]  # in any order
        assert {column: set(kinds) for column, kinds in rows.kinds.items()} == {column: {"text"} for column in GOOD}
        assert os.path.basename(rows[2].where).startswith("rows.")
        with pytest.raises(IndexError):
            rows[3]
    assert list((tmp_path / "spool").iterdir()) == []


def test_every_reader_reads_remote_files(tmp_path):
    memory = fsspec.filesystem("memory")
    for address in write_every_way(tmp_path):
        reader, path = split_reader(address)
        (name,) = files_of(reader, path, "data_path")
        memory.pipe(f"/remote/{os.path.basename(name)}", Path(name).read_bytes())
        assert list(rows_at(f"{reader}:memory://remote/{os.path.basename(name)}")) == ROWS
    memory.store.clear()


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


def test_the_kinds_of_arrow_columns(tmp_path):
    import pyarrow

    columns = {
        "text": (pyarrow.array(["a"]), "text"),
        "names": (pyarrow.array(["a"]).dictionary_encode(), "text"),
        "list": (pyarrow.array([[1]]), "a list"),
        "struct": (pyarrow.array([{"x": 1}]), "an object"),
        "flag": (pyarrow.array([True]), "a truth value"),
        "float": (pyarrow.array([0.5]), "a number"),
        "bytes": (pyarrow.array([b"x"]), "a binary"),
        "null": (pyarrow.array([None]), None),
    }
    table = pyarrow.table({name: values for name, (values, _) in columns.items()})
    with pyarrow.ipc.new_file(str(tmp_path / "rows.arrow"), table.schema) as file:
        file.write_table(table)
    kinds = rows_at(f"arrow:{tmp_path}/rows.arrow").kinds
    for name, (_, kind) in columns.items():
        assert list(kinds[name]) == ([] if kind is None else [kind])


def test_a_structs_nulls_are_left_out(tmp_path):
    """Arrow gives every struct of a column every key that one of them has."""
    import pyarrow
    import pyarrow.parquet

    rows = [{"m": [{"role": "a", "extra": "x"}, {"role": "b"}], "n": None}, {"m": [], "n": {"k": {"j": 1, "i": None}}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    read = rows_at(f"parquet:{tmp_path}/rows.parquet")
    assert read[0] == {"m": [{"role": "a", "extra": "x"}, {"role": "b"}], "n": None}
    assert read[1] == {"m": [], "n": {"k": {"j": 1}}}


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("a.csv", b"", "a.csv is empty: expected a first line that names the columns"),
        ("a.csv", b"p,q\n1,2\n3\n", "a.csv, line 3: expected 2 values ('p', 'q'), got 1; a value with a delimiter"),
        ("a.csv", b"p,q\n1,2,3\n", "a.csv, line 2: expected 2 values ('p', 'q'), got 3"),
        ("a.csv", b"p,p\n1,2\n", "a.csv, line 1: two columns have one name: p, p"),
        ("a.csv", b'p,q\n1,"2\n', "a.csv, line 2: expected comma-separated values: unexpected end of data"),
        ("a.csv", b"p,q\n1,\xff\n", "a.csv, line 1 or after: expected UTF-8 text: invalid start byte"),
        ("a.parquet", b"nothing of the kind", "a.parquet: expected a Parquet file: "),
        ("a.parquet", b"", "a.parquet: expected a Parquet file: "),
        ("a.arrow", b"nothing of the kind", "a.arrow: expected an Arrow file or stream: "),
        ("a.arrow", b"", "a.arrow: expected an Arrow file or stream: "),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, fragment):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ThreestepError) as caught:
        rows_at(f"{name.partition('.')[2]}:{tmp_path / name}")
    assert fragment in str(caught.value)


@pytest.mark.parametrize("value", ["a", {"naïve": "a"}])
def test_names_that_are_no_utf8_are_a_sentence(tmp_path, value):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([{"naïve": value} if value == "a" else {"x": value}])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    for reader in ("parquet", "arrow"):
        path = tmp_path / f"a.{reader}"
        path.write_bytes(path.read_bytes().replace("naïve".encode(), b"na\xe2\xafve"))
        with pytest.raises(ThreestepError, match=f"a.{reader}: expected .*: .*invalid continuation byte"):
            rows_at(f"{reader}:{path}")[0]


@pytest.mark.parametrize("reader", ["csv", "parquet"])
def test_what_is_expected_of_columns(tmp_path, reader):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "rows.csv").write_text("n,text\n1,a\n")
    pyarrow.parquet.write_table(pyarrow.table({"n": [1], "text": ["a"]}), tmp_path / "rows.parquet")
    path = str(tmp_path / f"rows.{reader}")
    assert len(open_rows(reader, [path], None, Expected({"text": "text_column"}, ("text",)))) == 1
    with pytest.raises(ThreestepError, match="no column 'body'; the file has 'n', 'text'; name the .* --text_column"):
        open_rows(reader, [path], None, Expected({"body": "text_column"}))
    if reader == "parquet":
        with pytest.raises(ThreestepError, match="rows.parquet: column 'n': expected text, got a number"):
            open_rows(reader, [path], None, Expected((), ("n",)))


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


def test_rows_are_read_from_several_threads_at_once(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(2000)))
    rows = rows_at(f"jsonl:{tmp_path}/rows.jsonl")
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda n: rows[n]["n"], range(2000))) == list(range(2000))


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ('"\\ud800"', r"expected text, got .ud800, half of a pair that stands for one character"),
        ("[" * 100_000, "expected (one|a) JSON object, got one that cannot be read: .*recursion"),
        ("9" * 5000, "expected (one|a) JSON object, got one that cannot be read: .*digits"),
    ],
)
def test_json_that_nobody_can_use(tmp_path, value, sentence):
    line = '{"prompt": ' + value + "}"
    for name, content in (("jsonl", "{}\n" + line), ("json", "[{},\n" + line + "]")):
        path = tmp_path / f"rows.{name}"
        path.write_text(content)
        with pytest.raises(ThreestepError, match=f"rows.{name}, line 2: {sentence}"):
            open_rows(name, [str(path)], None)


def test_characters_written_as_pairs_are_text(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "\\ud83d\\ude00 \\\\ud800"}\n')
    assert open_rows("jsonl", [str(path)], None)[0]["prompt"] == "\U0001f600 \\ud800"


def test_a_damaged_arrow_file_is_no_crash(tmp_path):
    """Its offsets point outside: to read the row would end the process."""
    table = pyarrow.table({"prompt": ["first", "second"]})
    with pyarrow.ipc.new_file(str(tmp_path / "rows.arrow"), table.schema) as writer:
        writer.write_table(table)
    content = (tmp_path / "rows.arrow").read_bytes()
    offsets = np.array([0, 5, 11], np.int32).tobytes()  # where each text begins, and the last one's end
    assert content.count(offsets) == 1
    (tmp_path / "rows.arrow").write_bytes(content.replace(offsets, np.array([0, 5, 2**30], np.int32).tobytes()))
    with pytest.raises(ThreestepError, match="rows.arrow: expected an Arrow file or stream: .*offsets"):
        open_rows("arrow", [str(tmp_path / "rows.arrow")], None)
