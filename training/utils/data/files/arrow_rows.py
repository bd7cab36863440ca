"""Parquet, Arrow and CSV files as sequences of rows, read from an Arrow table that is mapped into memory.

Parquet and CSV files, which have no random access, are converted once to Arrow in a file without a name.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from training.utils.base.errors import ThreestepError
from training.utils.data.files.columns import Expected, FileRow, JoinedRows, Kinds, check_kinds, column_names
from training.utils.data.files.content import (
    ARROW,
    PARQUET,
    START_BYTES,
    check_kind,
    encoding_of,
    mapped,
    open_local,
    open_stream,
    spool_file,
    start_of,
)

_ROWS_PER_BATCH = 1024
_START_BYTES = 1 << 16  # the names of a CSV's columns take less
_DELIMITERS = ",;\t|"
_NAMES_DELIMITER = re.compile(r"sep=(.)\r?\n")
_QUOTED = re.compile(r'"[^"]*"')


class ArrowRows(JoinedRows):
    """The rows of a mapped Arrow table. `lines`: of each row in a text file; otherwise rows are numbered from 0.

    Nulls in a struct are left out (see `json_rows`), and a map is an object.
    """

    def __init__(
        self, path: str, table: Any, expected: Expected | None = None, lines: Sequence[int] | None = None
    ) -> None:
        super().__init__([batch for batch in table.to_batches() if batch.num_rows])
        self.path = path
        self.nulls: Counter[str] = Counter()  # none is known to have been written
        self._lines = lines
        self.kinds: Kinds = {name: _kinds_of_column(table.column(name), path) for name in table.schema.names}
        try:
            self._decoders = {field.name: decode for field in table.schema if (decode := _decoder(field.type))}
        except UnicodeDecodeError as error:  # texts were validated, a struct's keys were not
            raise ThreestepError(f"{path}: expected keys in UTF-8: {error.reason}") from error
        check_kinds(self.kinds, path, expected)

    def __getitem__(self, index: Any) -> Any:
        index = int(index)
        batch, inside = self._place(index)
        where = f"{self.path}, " + (f"row {index}" if self._lines is None else f"line {self._lines[index]}")
        (values,) = batch.slice(inside, 1).to_pylist()
        try:
            values |= {name: decode(values[name]) for name, decode in self._decoders.items()}
        except (ValueError, RecursionError) as error:
            raise ThreestepError(f"{where}: {error}") from error
        return FileRow(values, where)


def read_parquet(path: str, expected: Expected | None = None, spool_dir: str | None = None) -> ArrowRows:
    import pyarrow
    import pyarrow.parquet

    with open_local(path, spool_dir) as file:
        check_kind(file.read(START_BYTES), path, PARQUET)
        try:
            parquet = pyarrow.parquet.ParquetFile(file)
            table = _spooled(parquet.schema_arrow, parquet.iter_batches(_ROWS_PER_BATCH), spool_dir)
            table.validate(full=True)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: a column's name
            raise ThreestepError(f"{path}: expected a Parquet file: {_first_line(error)}") from error
    return ArrowRows(path, table, expected)


def read_arrow(path: str, expected: Expected | None = None, spool_dir: str | None = None) -> ArrowRows:
    """Both Arrow formats: files (Feather) and streams, which `datasets` writes."""
    import pyarrow

    with open_local(path, spool_dir) as file:
        check_kind(file.read(START_BYTES), path, ARROW)
        content = pyarrow.py_buffer(mapped(file))
    try:
        try:
            table = pyarrow.ipc.open_file(content).read_all()
        except pyarrow.ArrowInvalid:
            table = pyarrow.ipc.open_stream(content).read_all()
        # Wrong offsets in a damaged file would crash the process when a row is read.
        table.validate(full=True)
        _ = table.schema.names
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ThreestepError(f"{path}: expected an Arrow file or stream: {_first_line(error)}") from error
    return ArrowRows(path, table, expected)


def read_csv(path: str, expected: Expected | None = None, spool_dir: str | None = None) -> ArrowRows:
    """A file whose first row names the columns; values are text, empty ones null. It is cut at commas, .tsv at tabs; if
    the first row has no comma, at semicolons, tabs or bars."""
    import pyarrow

    lines = array("q")
    with open_stream(path) as file:
        check_kind(start_of(file), path, "CSV")
        records = _csv_records(io.BufferedReader(file, _START_BYTES), path)  # type: ignore[arg-type]
        _, names = next(records)
        schema = pyarrow.schema([(name, pyarrow.large_string()) for name in names])
        table = _spooled(schema, _csv_batches(records, schema, lines), spool_dir)
    return ArrowRows(path, table, expected, lines)


class _CsvForm(NamedTuple):
    """lines_before: the first one may name the delimiter, as Excel writes it."""

    encoding: str
    delimiter: str
    lines_before: int = 0


def _csv_form(start: bytes, path: str) -> _CsvForm:
    encoding = encoding_of(start)
    text = start.decode(encoding, "ignore")
    named = _NAMES_DELIMITER.match(text)
    if named:
        return _CsvForm(encoding, named[1], 1)
    if ".tsv" in path:
        return _CsvForm(encoding, "\t")
    first_line = next(iter(_QUOTED.sub("", text).strip().splitlines()), "")
    return _CsvForm(encoding, next((mark for mark in _DELIMITERS if mark in first_line), ","))


def _csv_records(file: io.BufferedReader, path: str) -> Iterator[tuple[int, list[str]]]:
    """The line on which each record begins, and its values; the column names first."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # the default refuses texts of 128 KiB
    form = _csv_form(file.peek(_START_BYTES), path)
    text = io.TextIOWrapper(file, form.encoding, newline="")
    for _ in range(form.lines_before):
        text.readline()
    reader = csv.reader(text, delimiter=form.delimiter, strict=True)
    names: list[str] = []
    while True:
        line = form.lines_before + reader.line_num + 1
        try:
            values = next(reader, None)
        except csv.Error as error:
            raise ThreestepError(f"{path}, line {line}: expected comma-separated values: {error}") from error
        except UnicodeDecodeError as error:
            raise ThreestepError(
                f"{path}, line {line} or after: expected UTF-8 text: {error.reason}; save it as UTF-8 "
                "(spreadsheets call it CSV UTF-8)"
            ) from error
        if values is None:
            break
        if not values:
            continue
        if names and len(values) != len(names):
            raise ThreestepError(
                f"{path}, line {line}: expected {len(names)} values ({column_names(names)}), got {len(values)}; "
                'a value with a delimiter or a line break needs quotes, "like, this"'
            )
        if not names and len(set(values)) < len(values):
            raise ThreestepError(f"{path}, line {line}: two columns share a name: {', '.join(values)}; rename one")
        names = names or values
        yield line, values
    if not names:
        raise ThreestepError(f"{path} is empty: expected a first line with the column names")


def _csv_batches(records: Iterator[tuple[int, list[str]]], schema: Any, lines: array[int]) -> Iterator[Any]:
    import pyarrow

    while batch := list(islice(records, _ROWS_PER_BATCH)):
        lines.extend(line for line, _ in batch)
        columns = zip(*([value or None for value in values] for _, values in batch), strict=True)
        yield pyarrow.record_batch([pyarrow.array(column, pyarrow.large_string()) for column in columns], schema)


def _spooled(schema: Any, batches: Iterator[Any], spool_dir: str | None) -> Any:
    """Record batches as one table that is mapped from an unnamed file."""
    import pyarrow

    with spool_file(spool_dir) as file:
        # A stream, because batches of a categorical column may have dictionaries of their own.
        with pyarrow.ipc.new_stream(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        file.flush()
        return pyarrow.ipc.open_stream(pyarrow.py_buffer(mapped(file))).read_all()


def _is_json(arrow_type: Any) -> bool:
    """True for Arrow's extension type for JSON text, in which `datasets` stores values of mixed types."""
    return getattr(arrow_type, "extension_name", None) == "arrow.json"


def _decoder(arrow_type: Any) -> Callable[[Any], Any] | None:
    """A function from a value of this type, as pyarrow gives it, to what it holds: of a struct an object without nulls,
    of a map an object, of JSON text its value. None if both are one."""
    from pyarrow import types

    if _is_json(arrow_type):
        return _of_json
    if types.is_map(arrow_type):
        return partial(_of_map, decode=_decoder(arrow_type.item_type) or _as_it_is)
    if types.is_struct(arrow_type):
        inner = {field.name: _decoder(field.type) or _as_it_is for field in arrow_type}
        return lambda value: value and {key: inner[key](each) for key, each in value.items() if each is not None}
    if any(is_list(arrow_type) for is_list in _lists()) and (item := _decoder(arrow_type.value_type)):
        return lambda values: values and [item(value) for value in values]
    return None


def _of_json(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a JSON column: expected JSON text: {error}") from error


def _of_map(pairs: Any, decode: Callable[[Any], Any]) -> dict[str, Any] | None:
    """The object of a map, which pyarrow gives as pairs."""
    if pairs is None:
        return None
    read = {str(key): decode(value) for key, value in pairs}
    if len(read) < len(pairs):
        keys = ", ".join(str(key) for key, _ in pairs)
        raise ValueError(f"expected a map with unique keys, got the keys {keys}")
    return read


def _as_it_is(value: Any) -> Any:
    return value


def _lists() -> tuple[Callable[[Any], bool], ...]:
    from pyarrow import types

    return types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view


def _kinds_of_column(column: Any, path: str) -> dict[str, str]:
    """The kinds of a column's values: by its type, of JSON by the first sign of each text."""
    if not _is_json(column.type):
        return _kinds_of_type(column.type, path)
    kinds = {"[": "a list", "{": "an object", '"': "text", "t": "a truth value", "f": "a truth value"}
    texts = (text for chunk in column.chunks for text in chunk.storage.to_pylist() if text)
    starts = {text.lstrip()[:1] for text in texts} - {"n", ""}
    return {kinds.get(start, "a number"): path for start in sorted(starts)}


def _kinds_of_type(arrow_type: Any, path: str) -> dict[str, str]:
    from pyarrow import types

    if types.is_dictionary(arrow_type) or types.is_run_end_encoded(arrow_type):
        arrow_type = arrow_type.value_type
    tests = {
        "text": (types.is_string, types.is_large_string, types.is_string_view),
        "a list": _lists(),
        "an object": (types.is_struct, types.is_map),
        "a truth value": (types.is_boolean,),
        "a number": (types.is_integer, types.is_floating),
    }
    if types.is_null(arrow_type):
        return {}
    kind = next((kind for kind, checks in tests.items() if any(check(arrow_type) for check in checks)), None)
    return {kind or f"a {arrow_type}": path}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
