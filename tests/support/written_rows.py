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
    """The value as pyarrow takes it for a type with maps."""
    if isinstance(value, dict) and pyarrow.types.is_map(kind):
        return [(key, _with_maps(inner, kind.item_type)) for key, inner in value.items()]
    if isinstance(value, dict):
        return {field.name: _with_maps(value.get(field.name), field.type) for field in kind}
    return [_with_maps(inner, kind.value_type) for inner in value] if isinstance(value, list) else value


def map_table(rows: Rows) -> Any:
    """A table with maps."""
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
    """A table of the types that polars writes."""
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


def _arrow(new: Callable[..., Any]) -> Callable[[Any, Path], None]:
    def write(written: Any, path: Path) -> None:
        with new(str(path), written.schema) as file:
            file.write_table(written)

    return write


def _of_datasets(write: Callable[[Any, Path], None]) -> Callable[[Rows, Path], None]:
    def written(rows: Rows, path: Path) -> None:
        import datasets

        datasets.disable_progress_bars()
        write(datasets.Dataset.from_list(list(rows)), path)

    return written


def _datasets_json(rows: Rows, path: Path) -> None:
    """Values of one key that have several types, and objects without keys, need `datasets`' columns of JSON."""
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list(list(rows), on_mixed_types="use_json").to_parquet(str(path))


def _polars(rows: Rows) -> Any:
    import polars

    return polars.DataFrame(list(rows), infer_schema_length=None)


def _polars_categories(rows: Rows) -> Any:
    import polars

    return _polars(rows).with_columns(polars.col(polars.String).cast(polars.Categorical))


def _pandas(rows: Rows, path: Path) -> None:
    """With an index, which becomes a column."""
    import pandas

    pandas.DataFrame(list(rows), index=[9, 4, 6][: len(rows)]).to_parquet(path)


_FILE, _STREAM = _arrow(pyarrow.ipc.new_file), _arrow(pyarrow.ipc.new_stream)
# What writes the rows, and the address with {} for a file's name.
WRITERS: dict[str, tuple[Callable[[Rows, Path], Any], str]] = {
    "JSON lines": (_json_lines, "jsonl:{}.jsonl"),
    "JSON lines, compressed, without saying so": (
        lambda rows, path: (_json_lines(rows, path), path.write_bytes(gzip.compress(path.read_bytes()))),
        "jsonl:{}.jsonl",
    ),
    "JSON lines in UTF-16": (
        lambda rows, path: path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-16"),
        "jsonl:{}.jsonl",
    ),
    "JSON lines that end in CR": (
        lambda rows, path: path.write_text("".join(json.dumps(row) + "\r" for row in rows), newline=""),
        "jsonl:{}.jsonl",
    ),
    "a JSON list": (lambda rows, path: path.write_text(json.dumps(rows, indent=1)), "json:{}.json"),
    "CSV": (_csv, "csv:{}.csv"),
    "Parquet": (lambda rows, path: parquet.write_table(table(rows), path), "parquet:{}.parquet"),
    "Parquet of one row a group": (
        lambda rows, path: parquet.write_table(table(rows), path, row_group_size=1),
        "parquet:{}.parquet",
    ),
    "Parquet with maps": (lambda rows, path: parquet.write_table(map_table(rows), path), "parquet:{}.parquet"),
    "Parquet of polars' types": (
        lambda rows, path: parquet.write_table(polars_table(rows), path),
        "parquet:{}.parquet",
    ),
    "Parquet with categories": (
        lambda rows, path: parquet.write_table(categorical_table(rows), path, row_group_size=1),
        "parquet:{}.parquet",
    ),
    "Parquet of pandas": (_pandas, "parquet:{}.parquet"),
    "an Arrow file": (lambda rows, path: _FILE(table(rows), path), "arrow:{}.arrow"),
    "an Arrow file with maps": (lambda rows, path: _FILE(map_table(rows), path), "arrow:{}.arrow"),
    "an Arrow stream of polars' types": (lambda rows, path: _STREAM(polars_table(rows), path), "arrow:{}.arrow"),
    "an Arrow stream with categories": (lambda rows, path: _STREAM(categorical_table(rows), path), "arrow:{}.arrow"),
    "datasets' to_json": (_of_datasets(lambda rows, path: rows.to_json(str(path))), "jsonl:{}.jsonl"),
    "datasets' to_json as a list": (
        _of_datasets(lambda rows, path: rows.to_json(str(path), lines=False)),
        "json:{}.json",
    ),
    "datasets' to_parquet": (_of_datasets(lambda rows, path: rows.to_parquet(str(path))), "parquet:{}.parquet"),
    "datasets' save_to_disk": (_of_datasets(lambda rows, path: rows.save_to_disk(str(path))), "{}"),
    "datasets' columns of JSON": (_datasets_json, "parquet:{}.parquet"),
}
# The same by polars, of which few environments have a copy.
POLARS: dict[str, tuple[Callable[[Rows, Path], Any], str]] = {
    "polars' write_parquet": (lambda rows, path: _polars(rows).write_parquet(path), "parquet:{}.parquet"),
    "polars' write_ipc": (lambda rows, path: _polars(rows).write_ipc(path), "arrow:{}.arrow"),
    "polars' write_ipc_stream": (lambda rows, path: _polars(rows).write_ipc_stream(path), "arrow:{}.arrow"),
    "polars' write_ndjson": (lambda rows, path: _polars(rows).write_ndjson(path), "jsonl:{}.jsonl"),
    "polars' write_json": (lambda rows, path: _polars(rows).write_json(path), "json:{}.json"),
    "polars' categories": (lambda rows, path: _polars_categories(rows).write_parquet(path), "parquet:{}.parquet"),
}
