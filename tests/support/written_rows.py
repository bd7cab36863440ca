"""The same rows in every file format, as the programs that write them do."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

Rows = Sequence[dict[str, Any]]
Writer = tuple[Callable[["Rows", Path], Any], str]  # and the address with {} for a file's name


def _json_lines(rows: Rows, path: Path) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _csv(rows: Rows, path: Path) -> None:
    """Lists and objects as JSON text."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow({key: json.dumps(v) if isinstance(v, (list, dict)) else v for key, v in row.items()})


def table(rows: Rows) -> Any:
    return pyarrow.Table.from_pylist(list(rows))


def _map_type(kind: Any) -> Any:
    """The type with a map wherever all fields of a struct have one type, as Spark reads objects without a schema."""
    if pyarrow.types.is_list(kind):
        return pyarrow.list_(_map_type(kind.value_type))
    if not pyarrow.types.is_struct(kind):
        return kind
    fields = [(field.name, _map_type(field.type)) for field in kind]
    first = fields[0][1]
    return (
        pyarrow.map_(pyarrow.string(), first) if all(type_ == first for _, type_ in fields) else pyarrow.struct(fields)
    )


def _with_maps(value: Any, kind: Any) -> Any:
    if isinstance(value, dict) and pyarrow.types.is_map(kind):
        return [(key, _with_maps(inner, kind.item_type)) for key, inner in value.items()]
    if isinstance(value, dict):
        return {field.name: _with_maps(value.get(field.name), field.type) for field in kind}
    return [_with_maps(inner, kind.value_type) for inner in value] if isinstance(value, list) else value


def map_table(rows: Rows) -> Any:
    plain = table(rows)
    kinds = {field.name: _map_type(field.type) for field in plain.schema}
    columns = {
        name: pyarrow.array([_with_maps(row.get(name), kind) for row in rows], kind) for name, kind in kinds.items()
    }
    return pyarrow.table(columns)


def _polars_type(kind: Any) -> Any:
    if pyarrow.types.is_string(kind):
        return pyarrow.large_string()
    if pyarrow.types.is_list(kind):
        return pyarrow.large_list(_polars_type(kind.value_type))
    if pyarrow.types.is_struct(kind):
        return pyarrow.struct([(field.name, _polars_type(field.type)) for field in kind])
    return kind


def polars_table(rows: Rows) -> Any:
    plain = table(rows)
    return plain.cast(pyarrow.schema([(field.name, _polars_type(field.type)) for field in plain.schema]))


def categorical_table(rows: Rows) -> Any:
    """A table whose columns of text are categories, each batch with its own."""
    batches = [table(rows[:1]), table(rows)[1:]] if len(rows) > 1 else [table(rows)]
    coded = []
    for batch in batches:
        columns = {
            name: column.combine_chunks().dictionary_encode() if pyarrow.types.is_string(column.type) else column
            for name, column in zip(batch.column_names, batch.columns, strict=True)
        }
        coded.append(pyarrow.table(columns))
    return pyarrow.concat_tables(coded, promote_options="permissive")


def _parquet(make: Callable[[Rows], Any] = table, **how: Any) -> Writer:
    return lambda rows, path: parquet.write_table(make(rows), path, **how), "parquet:{}.parquet"


def _arrow(new: Callable[..., Any], make: Callable[[Rows], Any] = table) -> Writer:
    def write(rows: Rows, path: Path) -> None:
        written = make(rows)
        with new(str(path), written.schema) as file:
            file.write_table(written)

    return write, "arrow:{}.arrow"


def _of_datasets(write: Callable[[Any, str], None], address: str, **how: Any) -> Writer:
    """Values of one key that have several types, and objects without keys, need `datasets`' columns of JSON."""

    def written(rows: Rows, path: Path) -> None:
        import datasets

        datasets.disable_progress_bars()
        write(datasets.Dataset.from_list(list(rows), **how), str(path))

    return written, address


def _pandas(rows: Rows, path: Path) -> None:
    """With an index, which becomes a column."""
    import pandas

    pandas.DataFrame(list(rows), index=[9, 4, 6][: len(rows)]).to_parquet(path)


def _compressed(rows: Rows, path: Path) -> None:
    _json_lines(rows, path)
    path.write_bytes(gzip.compress(path.read_bytes()))


def _text_lines(end: str, encoding: str) -> Callable[[Rows, Path], Any]:
    return lambda rows, path: path.write_bytes("".join(json.dumps(row) + end for row in rows).encode(encoding))


_LINES, _LIST = "jsonl:{}.jsonl", "json:{}.json"
WRITERS: dict[str, Writer] = {
    "JSON lines": (_json_lines, _LINES),
    "JSON lines, compressed, without saying so": (_compressed, _LINES),
    "JSON lines in UTF-16": (_text_lines("\n", "utf-16"), _LINES),
    "JSON lines that end in CR": (_text_lines("\r", "utf-8"), _LINES),
    "a JSON list": (lambda rows, path: path.write_text(json.dumps(rows, indent=1)), _LIST),
    "CSV": (_csv, "csv:{}.csv"),
    "Parquet": _parquet(),
    "Parquet of one row a group": _parquet(row_group_size=1),
    "Parquet with maps": _parquet(map_table),
    "Parquet of polars' types": _parquet(polars_table),
    "Parquet with categories": _parquet(categorical_table, row_group_size=1),
    "Parquet of pandas": (_pandas, "parquet:{}.parquet"),
    "an Arrow file": _arrow(pyarrow.ipc.new_file),
    "an Arrow file with maps": _arrow(pyarrow.ipc.new_file, map_table),
    "an Arrow stream of polars' types": _arrow(pyarrow.ipc.new_stream, polars_table),
    "an Arrow stream with categories": _arrow(pyarrow.ipc.new_stream, categorical_table),
    "datasets' to_json": _of_datasets(lambda rows, path: rows.to_json(path), _LINES),
    "datasets' to_json as a list": _of_datasets(lambda rows, path: rows.to_json(path, lines=False), _LIST),
    "datasets' to_parquet": _of_datasets(lambda rows, path: rows.to_parquet(path), "parquet:{}.parquet"),
    "datasets' save_to_disk": _of_datasets(lambda rows, path: rows.save_to_disk(path), "{}"),
    "datasets' columns of JSON": _of_datasets(
        lambda rows, path: rows.to_parquet(path), "parquet:{}.parquet", on_mixed_types="use_json"
    ),
}


def _polars(method: str, address: str, categories: bool = False) -> Writer:
    def write(rows: Rows, path: Path) -> None:
        import polars

        frame = polars.DataFrame(list(rows), infer_schema_length=None)
        if categories:
            frame = frame.with_columns(polars.col(polars.String).cast(polars.Categorical))
        getattr(frame, method)(path)

    return write, address


# The same by polars, of which few environments have a copy.
POLARS: dict[str, Writer] = {
    "polars' write_parquet": _polars("write_parquet", "parquet:{}.parquet"),
    "polars' write_ipc": _polars("write_ipc", "arrow:{}.arrow"),
    "polars' write_ipc_stream": _polars("write_ipc_stream", "arrow:{}.arrow"),
    "polars' write_ndjson": _polars("write_ndjson", _LINES),
    "polars' write_json": _polars("write_json", _LIST),
    "polars' categories": _polars("write_parquet", "parquet:{}.parquet", categories=True),
}
