"""A call's rows and functions in memory, as files and names that a run reads. Models: `given_models`.

A run knows paths and names alone, so that it can be resumed, launched on ranks and repeated from its config.yaml.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from training.utils.base.errors import ThreestepError
from training.utils.base.storage import replace_file
from training.utils.base.user_files import GIVEN

ROWS = "given_rows"
REWARD = "reward"
_MAIN = "__main__"


def address_of_rows(rows: Any, folder: Path, resumes: bool = False) -> list[str]:
    """Return the value of --data_path for `rows`; those in memory are written to `folder`.

    rows: a path, an address or a registered name; several of them; dicts; or a datasets.Dataset
    resumes: the run began with the rows that are there; ThreestepError if these are others

    Raises ThreestepError for anything else, and for values that JSON does not have.
    """
    if isinstance(rows, (str, os.PathLike)):
        return [_with_reader(os.fspath(rows))]
    if isinstance(rows, Sequence) and rows and all(isinstance(row, (str, os.PathLike)) for row in rows):
        return [_with_reader(os.fspath(row)) for row in rows]
    if hasattr(rows, "to_parquet") and hasattr(rows, "column_names"):
        path, fresh = folder / f"{ROWS}.parquet", folder / f".{ROWS}.new"
        _made(folder)
        _plain_rows(rows).to_parquet(str(fresh))
        if resumes and path.is_file() and not _table(fresh).equals(_table(path)):
            raise _other_rows(path)
        fresh.replace(path)
        return [f"parquet:{path}"]
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        several = f" with the splits {', '.join(map(str, rows))}; give one of them" if isinstance(rows, Mapping) else ""
        raise ThreestepError(
            f"rows expects a list of dicts, a datasets.Dataset, a path or an address, got {_kind(rows)}{several}"
        )
    if not rows:
        raise ThreestepError("rows expects at least one row, got an empty list")
    text = "".join(f"{_line(row, index)}\n" for index, row in enumerate(rows))
    path = folder / f"{ROWS}.jsonl"
    if resumes and path.is_file() and path.read_text(encoding="utf-8") != text:
        raise _other_rows(path)
    _made(folder)
    replace_file(path, text)
    return [f"jsonl:{path}"]


def _plain_rows(rows: Any) -> Any:
    """A dataset with the columns that it shows. ThreestepError if it computes rows as they are read."""
    shown = getattr(rows, "format", None) or {}
    if shown.get("type") == "custom":
        raise ThreestepError(
            "rows expects a datasets.Dataset as it is stored, got one whose rows a transform makes as they are read "
            "(set_transform); make them first: rows.map(...)"
        )
    columns = shown.get("columns") or rows.column_names
    return rows if list(columns) == list(rows.column_names) else rows.with_format(None).select_columns(columns)


def _table(path: Path) -> Any:
    from pyarrow import parquet

    return parquet.read_table(path)


def _other_rows(path: Path) -> ThreestepError:
    return ThreestepError(
        f"rows are others than those that the run in {path.parent.parent} began with ({path}); give these to resume "
        "it, or another output_dir"
    )


def is_in_memory(rows: Any) -> bool:
    """True if `rows` are rows themselves, of which the run trains on all; a path's are shared by --data_split."""
    several = isinstance(rows, Sequence) and bool(rows) and isinstance(rows[0], (str, os.PathLike))
    return not isinstance(rows, (str, os.PathLike)) and not several


def with_addresses(settings: Mapping[str, Any], on_ranks: bool) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    """Return the settings with an address in the place of each function, and the functions by address; none where
    the address is that of a file.

    reward: a function, a name as --reward takes it, a list of them, or a dict of weights by function or name
    on_ranks: other processes call the functions, so that each must be one of a file's; ThreestepError if it is not.
    """
    functions: dict[str, Callable[..., Any]] = {}

    def address_of(function: Callable[..., Any], setting: str) -> str:
        if on_ranks:
            return _file_address(function, setting)
        address = f"{GIVEN}{_name_of(function)}"
        if functions.setdefault(address, function) is not function:
            raise ThreestepError(f"{setting}: two functions are called '{_name_of(function)}'; rename one of them")
        return address

    plain = dict(settings)
    for name, value in settings.items():
        if name == REWARD:
            plain[name] = _reward_text(value, address_of)
        elif callable(value):
            plain[name] = address_of(value, name)
    return plain, functions


def _reward_text(reward: Any, address_of: Callable[[Callable[..., Any], str], str]) -> str:
    """The value of --reward."""
    if isinstance(reward, str):
        return reward
    weights = reward if isinstance(reward, Mapping) else dict.fromkeys(_listed(reward), 1.0)
    if not weights:
        raise ThreestepError("reward expects a function, a name, a list of them or a dict of weights, got none")
    entries = []
    for one, weight in weights.items():
        if not isinstance(one, str) and not callable(one):
            raise ThreestepError(f"reward expects functions and names, got {_kind(one)}")
        address = one if isinstance(one, str) else address_of(one, REWARD)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise ThreestepError(f"reward expects a number as the weight of '{address}', got {weight!r}")
        # A name in a list may have its weight: ["gsm8k:0.5", my_reward].
        entries.append(f"{address}:{weight!r}" if isinstance(reward, Mapping) or not isinstance(one, str) else address)
    return ",".join(entries)


def _listed(reward: Any) -> list[Any]:
    return list(reward) if isinstance(reward, (list, tuple)) else [reward]


def _with_reader(address: str) -> str:
    """`jsonl:rows.jsonl` for `rows.jsonl`, where there is such a file and its ending names a reader."""
    from training.utils.data.files.readers import READERS

    ending = os.path.splitext(address)[1].removeprefix(".")
    is_file = ending in READERS and os.path.isfile(os.path.expanduser(address))
    return f"{ending}:{address}" if is_file else address


def _line(row: Mapping[str, Any], index: int) -> str:
    try:
        return json.dumps(dict(row), ensure_ascii=False)
    except (TypeError, ValueError):
        for column, value in row.items():
            try:
                json.dumps({column: value})
            except (TypeError, ValueError) as problem:
                raise ThreestepError(
                    f"rows[{index}]['{column}'] expects text, numbers, lists or dicts, got {_kind(value)} ({problem})"
                ) from problem
        raise


def _file_address(function: Any, setting: str) -> str:
    """FILE.py:NAME of a function at the top of a module; ThreestepError for others."""
    name = _name_of(function)
    path = inspect.getsourcefile(inspect.unwrap(function)) if inspect.isroutine(function) else None
    nested = getattr(function, "__qualname__", "") != name
    if path is None or nested or function.__module__ == _MAIN or not os.path.isfile(path):
        raise ThreestepError(
            f"{setting}: with num_ranks other processes call '{name}', which expects a function at the top of a module "
            f"in a file of its own, got one of {getattr(function, '__module__', 'no module')}; move it there, or give "
            "'FILE.py:NAME'"
        )
    return f"{path}:{name}"


def _name_of(function: Any) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else "function"  # a lambda's is <lambda>


def _kind(value: Any) -> str:
    return type(value).__name__


def _made(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
