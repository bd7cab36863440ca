"""Files as sequences of rows: JSON lines, JSON lists, CSV, Parquet and Arrow. A wrong row is one error that
names file and line. Knows nothing of prompts, responses or formats.

Rows are made when they are asked for; what stays in memory is where each begins. Parquet and CSV files, which
cannot be read in any order, are turned once into Arrow in a file without a name, which is mapped into memory.
"""

from __future__ import annotations

import bisect
import csv
import io
import json
import mmap
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from training.utils.data.addresses import find_files, open_local, open_stream, spool_file
from training.utils.run.errors import ThreestepError

_ROWS_PER_BATCH = 1024
_UNREADABLE = (ValueError, RecursionError)  # JSON with a number of thousands of digits, or nested too deep

# What kinds of values each column holds, and where each kind was met first. A null is of no kind.
Kinds = dict[str, dict[str, str]]


class Row(dict[str, Any]):
    """One row of a file; `where` says which, for errors: "rows.jsonl, line 7"."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        super().__init__(values)
        self.where = where


@dataclass(frozen=True)
class Expected:
    """What is expected of every row. `required`: columns that it has, as a mapping to the flags that name them
    where there are such flags; `texts`: columns in which nothing stands but text or null."""

    required: Mapping[str, str] | Sequence[str] = ()
    texts: Sequence[str] = ()


class JsonLines(Sequence):
    """The objects of a JSON-lines file, parsed when asked for.

    The constructor reads the whole file once and raises ThreestepError at the first row that is no object or not
    as `expected`. `kinds` are those of the columns met in any row. Blank lines are passed over. Several threads
    or forked processes may read at once.
    """

    def __init__(self, path: str, expected: Expected | None = None, spool_dir: str | None = None) -> None:
        self.path = path
        self.kinds: Kinds = {}
        self._begins, self._lines = array("q"), array("q")
        with open_local(path, spool_dir) as file:
            self._content = _mapped(file)
        begin, line_number = 0, 0
        while begin < len(self._content):
            line_number += 1
            line = self._line(begin)
            if line.strip():
                where = f"{path}, line {line_number}"
                row = _parse(line, where)
                _check_row(row, where, expected)
                _note_kinds(self.kinds, row, where)
                self._begins.append(begin)
                self._lines.append(line_number)
            begin += len(line)

    def _line(self, begin: int) -> bytes:
        end = self._content.find(b"\n", begin)
        return self._content[begin:] if end < 0 else self._content[begin : end + 1]

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: Any) -> Any:
        where = f"{self.path}, line {self._lines[int(index)]}"
        return Row(_parse(self._line(self._begins[int(index)]), where), where)


class JsonList(Sequence):
    """The objects of a file that holds one JSON list; the same checks and attributes as `JsonLines`."""

    def __init__(self, path: str, expected: Expected | None = None, spool_dir: str | None = None) -> None:
        self.path = path
        self.kinds: Kinds = {}
        self._begins, self._lines = array("q"), array("q")
        with open_stream(path) as file:
            self._text = _decode(file.read(), path)
        for row, begin, line_number in _items(self._text, path):
            where = f"{path}, line {line_number}"
            _check_row(row, where, expected)
            _note_kinds(self.kinds, row, where)
            self._begins.append(begin)
            self._lines.append(line_number)

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: Any) -> Any:
        values, _ = json.JSONDecoder().raw_decode(self._text, self._begins[int(index)])
        return Row(values, f"{self.path}, line {self._lines[int(index)]}")


class ArrowRows(Sequence):
    """The rows of an Arrow table, which stays where it is mapped from. `lines`: the line of each row in a file
    of text; otherwise rows are numbered from 0.

    A struct's nulls are left out: where rows have structs with different keys, Arrow puts them there.
    """

    def __init__(
        self,
        path: str,
        table: Any,
        expected: Expected | None = None,
        lines: Sequence[int] | None = None,
    ) -> None:
        self.path = path
        self._batches = [batch for batch in table.to_batches() if batch.num_rows]
        self._begins = [0]
        for batch in self._batches:
            self._begins.append(self._begins[-1] + batch.num_rows)
        self._lines = lines
        self.kinds: Kinds = {field.name: _kinds_of_type(field.type, path) for field in table.schema}
        for column in expected.required if expected else ():
            if column not in self.kinds:
                raise ThreestepError(_no_column(path, "the file has", column, self.kinds, expected))
        for column in expected.texts if expected else ():
            for kind in self.kinds.get(column, {}):
                if kind != "text":
                    raise ThreestepError(f"{path}: column '{column}': expected text, got {kind}")

    def __len__(self) -> int:
        return self._begins[-1]

    def __getitem__(self, index: Any) -> Any:
        index = int(index)
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        batch = bisect.bisect_right(self._begins, index) - 1
        try:
            (values,) = self._batches[batch].slice(index - self._begins[batch], 1).to_pylist()
        except UnicodeDecodeError as error:  # texts were validated, a struct's keys were not
            raise ThreestepError(f"{self.path}: expected keys of UTF-8 text: {error.reason}") from error
        where = f"row {index}" if self._lines is None else f"line {self._lines[index]}"
        return Row({name: _without_nulls(value) for name, value in values.items()}, f"{self.path}, {where}")


class Shards(Sequence):
    """The rows of several files, one file after the other."""

    def __init__(self, parts: Sequence[JsonLines | JsonList | ArrowRows]) -> None:
        self._parts = parts
        self._begins = [0]
        self.kinds: Kinds = {}
        for part in parts:
            self._begins.append(self._begins[-1] + len(part))
            for column, kinds in part.kinds.items():
                self.kinds[column] = {**kinds, **self.kinds.get(column, {})}

    def __len__(self) -> int:
        return self._begins[-1]

    def __getitem__(self, index: Any) -> Any:
        index = int(index)
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        part = bisect.bisect_right(self._begins, index) - 1
        return self._parts[part][index - self._begins[part]]


# Opening.


def read_parquet(path: str, expected: Expected | None = None, spool_dir: str | None = None) -> ArrowRows:
    import pyarrow
    import pyarrow.parquet

    with open_local(path, spool_dir) as file:
        try:
            parquet = pyarrow.parquet.ParquetFile(file)
            table = _spooled(parquet.schema_arrow, parquet.iter_batches(_ROWS_PER_BATCH), spool_dir)
            table.validate(full=True)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: a column's name
            raise ThreestepError(f"{path}: expected a Parquet file: {_first_line(error)}") from error
    return ArrowRows(path, table, expected)


def read_arrow(path: str, expected: Expected | None = None, spool_dir: str | None = None) -> ArrowRows:
    """Both of Arrow's own formats: the file's (Feather) and the stream's, which `datasets` writes."""
    import pyarrow

    with open_local(path, spool_dir) as file:
        content = pyarrow.py_buffer(_mapped(file))
    try:
        try:
            table = pyarrow.ipc.open_file(content).read_all()
        except pyarrow.ArrowInvalid:
            table = pyarrow.ipc.open_stream(content).read_all()
        # Offsets that a damaged file points elsewhere with would end the process when a row is read.
        table.validate(full=True)
        _ = table.schema.names
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ThreestepError(f"{path}: expected an Arrow file or stream: {_first_line(error)}") from error
    return ArrowRows(path, table, expected)


def read_csv(path: str, expected: Expected | None = None, spool_dir: str | None = None) -> ArrowRows:
    """A file whose first row names the columns; every value is text, an empty one is null. Columns are parted
    by commas, in a file named .tsv by tabs."""
    import pyarrow

    lines = array("q")
    with open_stream(path) as file:
        records = _csv_records(file, path)
        _, names = next(records)
        schema = pyarrow.schema([(name, pyarrow.large_string()) for name in names])
        table = _spooled(schema, _csv_batches(records, schema, lines), spool_dir)
    return ArrowRows(path, table, expected, lines)


def _csv_records(file: BinaryIO, path: str) -> Iterator[tuple[int, list[str]]]:
    """The number of the line that each record begins on, and its values; the names of the columns first."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # otherwise texts of 128 KiB are refused
    delimiter = "\t" if ".tsv" in path else ","
    reader = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""), delimiter=delimiter, strict=True)
    names: list[str] = []
    while True:
        line = reader.line_num + 1
        try:
            values = next(reader, None)
        except csv.Error as error:
            raise ThreestepError(f"{path}, line {line}: expected comma-separated values: {error}") from error
        except UnicodeDecodeError as error:
            raise ThreestepError(f"{path}, line {line} or after: expected UTF-8 text: {error.reason}") from error
        if values is None:
            break
        if not values:
            continue
        if names and len(values) != len(names):
            raise ThreestepError(
                f"{path}, line {line}: expected {len(names)} values ({column_names(names)}), got {len(values)}; "
                'a value with a delimiter or a line break stands between quotes, "like, this"'
            )
        if not names and len(set(values)) < len(values):
            raise ThreestepError(f"{path}, line {line}: two columns have one name: {', '.join(values)}")
        names = names or values
        yield line, values
    if not names:
        raise ThreestepError(f"{path} is empty: expected a first line that names the columns")


def _csv_batches(records: Iterator[tuple[int, list[str]]], schema: Any, lines: array[int]) -> Iterator[Any]:
    import pyarrow

    def batch() -> Any:
        columns = [pyarrow.array(values, pyarrow.large_string()) for values in zip(*waiting, strict=True)]
        return pyarrow.record_batch(columns, schema)

    waiting: list[list[str | None]] = []
    for line, values in records:
        lines.append(line)
        waiting.append([value or None for value in values])
        if len(waiting) == _ROWS_PER_BATCH:
            yield batch()
            waiting = []
    if waiting:
        yield batch()


def _spooled(schema: Any, batches: Iterator[Any], spool_dir: str | None) -> Any:
    """Record batches as one table that is mapped from a file without a name."""
    import pyarrow

    with spool_file(spool_dir) as file:
        with pyarrow.ipc.new_file(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        file.flush()
        return pyarrow.ipc.open_file(pyarrow.py_buffer(_mapped(file))).read_all()


def _mapped(file: BinaryIO) -> mmap.mmap | bytes:
    """A file's content, read where it is looked at; the mapping outlives the file object."""
    file.seek(0, io.SEEK_END)
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.tell() else b""


Rows = JsonLines | JsonList | ArrowRows | Shards

READERS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "jsonl": (JsonLines, (".jsonl", ".ndjson", ".json")),
    "json": (JsonList, (".json",)),
    "csv": (read_csv, (".csv", ".tsv")),
    "parquet": (read_parquet, (".parquet", ".pq")),
    "arrow": (read_arrow, (".arrow", ".feather", ".ipc")),
}


def split_reader(name: str) -> tuple[str, str] | None:
    """The reader and the address of `jsonl:PATH` and its like; None where a name is none of these."""
    reader, colon, address = name.partition(":")
    return (reader, address) if colon and reader in READERS and not address.startswith("//") else None


def files_of(reader: str, address: str, flag: str) -> list[str]:
    """The files that a reader finds behind an address (see `addresses.find_files`)."""
    return find_files(address, READERS[reader][1], flag)


def open_rows(
    reader: str,
    files: Sequence[str],
    spool_dir: str | None,
    expected: Expected | None = None,
) -> Rows:
    """The rows of files, by the reader of that name."""
    read, _ = READERS[reader]
    parts = [read(path, expected, spool_dir) for path in files]
    return parts[0] if len(parts) == 1 else Shards(parts)


# Checking.


def _decode(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ThreestepError(f"{where}: expected UTF-8 text: {error.reason} at byte {error.start}") from error


def _parse(line: bytes, where: str) -> Any:
    text = _decode(line, where)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ThreestepError(
            f"{where}: expected one JSON object, got text that is not JSON ({error.msg} at column "
            f"{error.colno}): "
            f"{text.strip()[:60]!r}"
        ) from error
    except _UNREADABLE as error:
        raise ThreestepError(f"{where}: expected one JSON object, got one that cannot be read: {error}") from error
    _check_characters(value, text, where)
    return value


def _check_characters(value: Any, text: str, where: str) -> None:
    r"""JSON may write half of a pair such as \ud83d\ude00 alone: nothing can store it or turn it into tokens."""
    if "\\ud" in text or "\\uD" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ThreestepError(
                f"{where}: expected text, got \\u{ord(error.object[error.start]):x}, half of a pair that stands for "
                "one character; write both halves, or the character itself"
            ) from error


def _items(text: str, path: str) -> Iterator[tuple[Any, int, int]]:
    """Each item of a JSON list with where it begins: the index into the text and the number of the line."""
    blanks = " \t\r\n"
    decoder = json.JSONDecoder()

    def skip(position: int) -> int:
        while position < len(text) and text[position] in blanks:
            position += 1
        return position

    position = skip(0)
    if text[position : position + 1] != "[":
        raise ThreestepError(
            f"{path}, line 1: expected one JSON list of objects, got {text[position : position + 40]!r}; "
            f"for one object a line write jsonl:{path}"
        )
    position = skip(position + 1)
    line_number, counted = 1, 0
    while text[position : position + 1] != "]":
        line_number += text.count("\n", counted, position)
        counted = position
        try:
            item, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise ThreestepError(
                f"{path}, line {error.lineno}: expected a JSON object, got text that is not JSON ({error.msg})"
            ) from error
        except _UNREADABLE as error:
            raise ThreestepError(
                f"{path}, line {line_number}: expected a JSON object, got one that cannot be read: {error}"
            ) from error
        _check_characters(item, text[position:end], f"{path}, line {line_number}")
        yield item, position, line_number
        position = skip(end)
        if text[position : position + 1] == ",":
            position = skip(position + 1)
        elif text[position : position + 1] != "]":
            at_line = 1 + text.count("\n", 0, position)
            raise ThreestepError(f"{path}, line {at_line}: the JSON list breaks off or lacks a comma here")


def _check_row(row: Any, where: str, expected: Expected | None) -> None:
    if not isinstance(row, dict):
        raise ThreestepError(f"{where}: expected a JSON object, got {kind_of(row)}")
    if expected is None:
        return
    for column in expected.required:
        if column not in row:
            raise ThreestepError(_no_column(where, "the row has", column, row, expected))
    for column in expected.texts:
        value = row.get(column)
        if value is not None and not isinstance(value, str):
            raise ThreestepError(f"{where}: column '{column}': expected text, got {kind_of(value)}")


def _no_column(where: str, has: str, column: str, columns: Mapping[str, Any], expected: Expected | None) -> str:
    flags = expected.required if expected else ()
    remedy = f"; name the right one with --{flags[column]}" if isinstance(flags, Mapping) else ""
    return f"{where}: no column '{column}'; {has} {column_names(columns)}{remedy}"


def _note_kinds(kinds: Kinds, row: Mapping[str, Any], where: str) -> None:
    for column, value in row.items():
        seen = kinds.setdefault(column, {})
        if value is not None and (kind := kind_of(value)) not in seen:
            seen[kind] = where


def kind_of(value: Any) -> str:
    """What a value is, in words, for errors and for telling formats apart."""
    if isinstance(value, bool):
        return "a truth value"
    names = {list: "a list", dict: "an object", str: "text", int: "a number", float: "a number"}
    return names.get(type(value), "null" if value is None else f"a {type(value).__name__}")


def _kinds_of_type(arrow_type: Any, path: str) -> dict[str, str]:
    from pyarrow import types

    if types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    tests = {
        "text": (types.is_string, types.is_large_string, types.is_string_view),
        "a list": (types.is_list, types.is_large_list, types.is_fixed_size_list),
        "an object": (types.is_struct,),
        "a truth value": (types.is_boolean,),
        "a number": (types.is_integer, types.is_floating),
    }
    if types.is_null(arrow_type):
        return {}
    kind = next((kind for kind, checks in tests.items() if any(check(arrow_type) for check in checks)), None)
    return {kind or f"a {arrow_type}": path}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def column_names(columns: Mapping[str, Any] | Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(columns)) or "no columns"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
