"""Forms in which a call's rows may be held in memory, as dicts or a datasets.Dataset. A library's objects are known by
the module of their class: nothing is imported for them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.utils.base.errors import ThreestepError
from training.utils.data.files.readers import names_evaluation, names_training

ROWS, EVAL_ROWS = "rows", "eval_rows"
_EXPECTS = (
    "expects a list or an iterable of dicts, a dict of columns, a datasets.Dataset, a pandas or polars DataFrame, a "
    "path or an address"
)
# A dict's values that are columns, besides lists and tuples.
_COLUMNS = (("numpy", "ndarray"), ("pandas", "Series"))
# Objects that hold no rows, and what to give in their place, by the module and name of their class.
_ADVICE = {
    ("pandas", "Series"): "pass the DataFrame, whose rows are the examples",
    ("polars", "Series"): "pass the DataFrame, whose rows are the examples",
    ("torch", "DataLoader"): "it yields batches; pass the rows it reads",
    ("numpy", "ndarray"): "name its columns: [{'prompt': a, 'completion': b} for a, b in rows]",
}


@dataclass(frozen=True)
class HeldRows:
    """train, held_out: a list of dicts or a datasets.Dataset; held_out is None if the run holds out rows itself."""

    train: Any
    held_out: Any = None


def is_in_memory(rows: Any) -> bool:
    """True if `rows` are rows themselves, of which the run trains on all; a path's are shared by --data_split."""
    return not is_path(rows) and not _are_paths(rows)


def is_path(rows: Any) -> bool:
    return isinstance(rows, (str, os.PathLike))


def _are_paths(rows: Any) -> bool:
    return isinstance(rows, Sequence) and bool(rows) and all(map(is_path, rows))


def is_dataset(rows: Any) -> bool:
    """True for a datasets.Dataset."""
    return all(hasattr(rows, name) for name in ("to_parquet", "column_names", "__len__"))


def held_rows(rows: Any, eval_rows: Any = None) -> HeldRows:
    """Read `rows`, and the held-out ones beside them; iterables are read once.

    ThreestepError for another object, and for splits of which it is not plain which is held out.
    """
    if not isinstance(rows, Mapping) or _has_columns(rows):
        return HeldRows(_read(rows, ROWS), None if eval_rows is None else _read(eval_rows, EVAL_ROWS))
    trains = [name for name in rows if names_training(str(name))]
    others = [name for name in rows if name not in trains]
    if len(trains) != 1 or len(others) > 1 or not all(names_evaluation(str(name)) for name in others):
        named = ", ".join(map(str, rows)) or "none"
        raise ThreestepError(
            f"rows expects the splits train and test (or validation), got {type(rows).__name__} with {named}; pass "
            "two of them separately: rows[NAME], eval_rows=rows[NAME]"
        )
    if others and eval_rows is not None:
        raise ThreestepError(
            f"rows already has a split {others[0]}, but eval_rows is passed too; pass only rows['{trains[0]}'] as rows"
        )
    held_out = rows[others[0]] if others else eval_rows
    return HeldRows(
        _read(rows[trains[0]], f"{ROWS}['{trains[0]}']"), None if held_out is None else _read(held_out, EVAL_ROWS)
    )


def _has_columns(rows: Mapping[Any, Any]) -> bool:
    """True for a dict of columns, or of one row; False for one of splits, each of which begins with a dict."""
    names = map(str, rows)
    if all(names_training(name) or names_evaluation(name) for name in names):
        return False
    return any(
        not isinstance(next(iter(held), None), (Mapping, type(None))) if _is_column(held) else isinstance(held, str)
        for held in rows.values()
    )


def _is_column(held: Any) -> bool:
    return isinstance(held, (list, tuple)) or _class_of(held) in _COLUMNS


def _class_of(thing: Any) -> tuple[str, str]:
    """The library and the name of its class."""
    return type(thing).__module__.partition(".")[0], type(thing).__name__


def _of_columns(columns: Mapping[Any, Any], name: str) -> list[dict[Any, Any]]:
    """The rows of a dict of columns. ThreestepError unless each is a list, and all have one length."""
    others = [f"'{column}' is {type(held).__name__}" for column, held in columns.items() if not _is_column(held)]
    if len(others) == len(columns):
        raise ThreestepError(f"{name} {_EXPECTS}, got one row; pass a list of rows: [{name}]")
    if others:
        raise ThreestepError(f"{name}: a dict of columns needs a list for each column, but {', '.join(others)}")
    lengths = {column: len(held) for column, held in columns.items()}
    if len(set(lengths.values())) > 1:
        each = ", ".join(f"{length:,} for '{column}'" for column, length in lengths.items())
        raise ThreestepError(f"{name}: a dict of columns needs lists of equal length, got {each}")
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _read(rows: Any, name: str) -> Any:
    """The rows of one split as a list of dicts, or the datasets.Dataset itself. name: the argument, for errors"""
    library, kind = _class_of(rows)
    if is_dataset(rows):
        plain = rows
    elif isinstance(rows, Mapping) and _has_columns(rows):
        plain = _of_columns(rows, name)
    elif (library, kind) in _ADVICE:
        raise ThreestepError(f"{name} {_EXPECTS}, got a {library} {kind}; {_ADVICE[library, kind]}")
    elif (library, kind) == ("pandas", "DataFrame"):
        plain = _of_pandas(rows, name)
    elif library == "polars" and kind in ("DataFrame", "LazyFrame"):
        plain = (rows.collect() if kind == "LazyFrame" else rows).to_dicts()
    elif (library, kind) == ("pyarrow", "Table"):
        plain = rows.to_pylist()
    elif library != "datasets" and (hasattr(rows, "to_dict") or hasattr(rows, "to_pandas")):
        made = "rows.to_pandas()" if hasattr(rows, "to_pandas") else 'rows.to_dict("records")'
        raise ThreestepError(f"{name} {_EXPECTS}, got a {library} {kind}; pass {made}")
    elif hasattr(rows, "__getitem__") and hasattr(rows, "__len__") and not hasattr(rows, "__iter__"):
        plain = [rows[index] for index in range(len(rows))]  # torch's datasets
    elif isinstance(rows, Iterable) and not isinstance(rows, (str, bytes, Mapping, os.PathLike)):
        plain = list(rows)
    else:
        raise ThreestepError(f"{name} {_EXPECTS}, got {kind}{_path_advice(rows, name)}")
    return _checked(plain, name)


def _path_advice(rows: Any, name: str) -> str:
    if not is_path(rows) or name != EVAL_ROWS:
        return ""
    return (
        f" {os.fspath(rows)!r}; put held-out rows in the same folder as the training rows, as test.jsonl and "
        "train.jsonl: rows='jsonl:FOLDER'"
    )


def _of_pandas(frame: Any, name: str) -> list[dict[Any, Any]]:
    """The records of a frame, with None for what it has as missing."""
    if not frame.columns.is_unique:
        twice = sorted({str(column) for column in frame.columns[frame.columns.duplicated()]})
        raise ThreestepError(f"{name} expects distinct column names, got {', '.join(twice)} twice; rename one")
    return [
        {column: None if _is_missing(value) else value for column, value in record.items()}
        for record in frame.to_dict("records")
    ]


def _is_missing(value: Any) -> bool:
    """True for NaN, NaT and pandas.NA, which differ from themselves, or do not say."""
    if isinstance(value, (str, list, tuple, dict)) or hasattr(value, "shape") and getattr(value, "shape", ()) != ():
        return False
    try:
        return bool(value != value)
    except (TypeError, ValueError):
        return type(value).__name__ == "NAType"


def _checked(rows: Any, name: str) -> Any:
    if len(rows) == 0:
        raise ThreestepError(f"{name} expects at least one row, got none")
    if is_dataset(rows):
        return rows
    odd = next((at for at, row in enumerate(rows) if not isinstance(row, Mapping)), None)
    if odd is None:
        return rows
    row = rows[odd]
    advice = ""
    if isinstance(row, str):
        advice = "; pass {'text': row} for each text to train on unchanged, or dicts with prompt and completion"
    elif hasattr(row, "_asdict"):
        advice = "; pass [row._asdict() for row in rows]"
    elif hasattr(row, "__dataclass_fields__"):
        advice = "; pass [dataclasses.asdict(row) for row in rows]"
    elif hasattr(row, "model_dump"):
        advice = "; pass [row.model_dump() for row in rows]"
    raise ThreestepError(f"{name} {_EXPECTS}, got {type(row).__name__} at {name}[{odd}]{advice}")
