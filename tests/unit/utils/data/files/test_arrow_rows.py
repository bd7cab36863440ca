"""Values of every Arrow type: maps are objects, and what other programs write is read as what it holds."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyarrow import parquet

from training.utils.base.errors import ThreestepError
from training.utils.data.files.readers import open_rows

TEXTS = pa.map_(pa.string(), pa.string())
COUNTS = pa.map_(pa.int32(), pa.int64())
MESSAGE = {"role": "user", "content": "Hi"}
PAIRS = list(MESSAGE.items())
STRUCT = pa.struct([("role", pa.string()), ("content", pa.string())])
VIEWS = pa.struct([("role", pa.string_view()), ("content", pa.string_view())])
CODED = pa.struct([("role", pa.dictionary(pa.int32(), pa.string())), ("content", pa.large_string())])


@pytest.mark.parametrize(
    ("kind", "given", "value", "expected"),
    [
        ("an object", TEXTS, PAIRS, MESSAGE),
        ("an object", TEXTS, [], {}),
        ("an object", pa.map_(pa.string(), COUNTS), [("a", [(1, 2), (3, None)])], {"a": {"1": 2, "3": None}}),
        ("an object", pa.struct([("m", TEXTS), ("n", TEXTS)]), {"m": PAIRS, "n": None}, {"m": MESSAGE}),
        ("a list", pa.list_(TEXTS), [PAIRS, None], [MESSAGE, None]),
        ("a list", pa.large_list(pa.struct([("m", TEXTS)])), [{"m": PAIRS}], [{"m": MESSAGE}]),
        ("a list", pa.list_(TEXTS, 1), [PAIRS], [MESSAGE]),
        ("an object", pa.map_(pa.string(), pa.list_(TEXTS)), [("a", [PAIRS])], {"a": [MESSAGE]}),
        ("a list", pa.list_(pa.struct([("key", pa.string()), ("value", pa.int64())])), [{"key": "a", "value": 1}],
         [{"key": "a", "value": 1}]),  # pairs that the type does not call a map
        ("a list", pa.list_(STRUCT), [MESSAGE], [MESSAGE]),
        ("a list", pa.list_view(VIEWS), [MESSAGE], [MESSAGE]),
        ("a list", pa.large_list_view(STRUCT), [MESSAGE], [MESSAGE]),
        ("a list", pa.list_(CODED), [MESSAGE], [MESSAGE]),
        ("text", pa.string_view(), "a", "a"),
        ("text", pa.large_string(), "a", "a"),
        ("text", pa.dictionary(pa.int32(), pa.string()), "a", "a"),
        ("a truth value", pa.bool_(), True, True),
        ("a number", pa.float64(), 0.5, 0.5),
        ("a binary", pa.binary(), b"x", b"x"),
        (None, pa.null(), None, None),
    ],
)  # fmt: skip
def test_a_value_of_each_type(tmp_path, kind, given, value, expected):
    table = pa.table({"x": pa.array([value, None], given)})
    with pa.ipc.new_file(str(tmp_path / "rows.arrow"), table.schema) as file:
        file.write_table(table)
    rows = open_rows("arrow", [str(tmp_path / "rows.arrow")], None)
    assert list(rows.kinds["x"]) == [kind] * (kind is not None) and list(rows) == [{"x": expected}, {"x": None}]


def test_a_map_with_a_key_twice_is_named(tmp_path):
    array = pa.array([[("a", "1"), ("a", "2")]], TEXTS)
    parquet.write_table(pa.table({"x": array}), tmp_path / "rows.parquet")
    rows = open_rows("parquet", [str(tmp_path / "rows.parquet")], None)
    with pytest.raises(ThreestepError, match="rows.parquet, row 0: expected a map with unique keys, got .* a, a"):
        rows[0]


def test_text_in_runs(tmp_path):
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), pa.array(["Hi"]))
    table = pa.table({"x": runs})
    with pa.ipc.new_file(str(tmp_path / "rows.arrow"), table.schema) as file:
        file.write_table(table)
    rows = open_rows("arrow", [str(tmp_path / "rows.arrow")], None)
    assert [row["x"] for row in rows] == ["Hi", "Hi"] and list(rows.kinds["x"]) == ["text"]


def test_a_structs_nulls_are_left_out(tmp_path):
    """Arrow gives every struct of a column every key that one of them has."""
    rows = [{"m": [{"role": "a", "extra": "x"}, {"role": "b"}], "n": None}, {"m": [], "n": {"k": {"j": 1, "i": None}}}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    read = open_rows("parquet", [str(tmp_path / "rows.parquet")], None)
    assert list(read) == [rows[0], {"m": [], "n": {"k": {"j": 1}}}]


def test_columns_of_json_are_text_whose_nulls_are_meant(tmp_path):
    array = pa.array(['{"a": null, "b": [null, 1]}', "[1]"], pa.json_(pa.string()))
    parquet.write_table(pa.table({"x": array}), tmp_path / "rows.parquet")
    rows = open_rows("parquet", [str(tmp_path / "rows.parquet")], None)
    assert [row["x"] for row in rows] == [{"a": None, "b": [None, 1]}, [1]]
