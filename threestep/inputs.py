"""A call's rows and functions in memory, as files and names that a run reads. Forms of rows: `row_forms`; models:
`given_models`.

A run knows paths and names alone, so that it can be resumed, launched on ranks and repeated from its config.yaml.
"""

from __future__ import annotations

import datetime
import decimal
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from threestep.pictures import PictureFolder
from threestep.row_forms import EVAL_ROWS, ROWS, held_rows, is_dataset, is_in_memory, is_path
from training.utils.base.errors import ThreestepError
from training.utils.base.storage import replace_file
from training.utils.base.user_files import GIVEN
from training.utils.plugins.objectives import Estimator, PolicyLoss
from training.utils.plugins.registry import plugin_module

ROWS_FILE = "given_rows"
REWARD, CALLBACK = "reward", "callback"
_REWARD_FUNCS, _REWARD_WEIGHTS = "reward_funcs", "reward_weights"  # TRL's
_MAIN = "__main__"


def address_of_rows(rows: Any, folder: Path, resumes: bool = False, *, eval_rows: Any = None) -> list[str]:
    """Return the value of --data_path for `rows`; those in memory are written to `folder`.

    rows: a path, an address or a registered name; several of them; or rows in memory, in one of the forms of
        `row_forms`. eval_rows: the held-out ones of rows in memory, in such a form
    resumes: the run began with the rows that are there; ThreestepError if these are others

    Raises ThreestepError for anything else, and for values that JSON does not have.
    """
    if not is_in_memory(rows):
        if eval_rows is not None:
            raise ThreestepError(
                "eval_rows needs rows in memory, but rows is a path or an address; put files named train and test in "
                "one folder and pass that folder (rows='jsonl:FOLDER'), or load the rows"
            )
        addresses = [os.fspath(row) for row in ([rows] if is_path(rows) else rows)]
        _check_addresses(addresses)
        return [_with_reader(address) for address in addresses]
    held = held_rows(rows, eval_rows)
    if held.held_out is None:
        return [_written(held.train, folder, ROWS_FILE, resumes=resumes)]
    # A folder's files have their shares by their names.
    folder /= "rows"
    train, held_out = held.train, held.held_out
    if is_dataset(train) != is_dataset(held_out):
        train, held_out = list(train), list(held_out)
    _written(held_out, folder, "test", resumes=resumes, name=EVAL_ROWS)
    reader = _written(train, folder, "train", resumes=resumes).partition(":")[0]
    return [f"{reader}:{folder}"]


def _check_addresses(addresses: Sequence[str]) -> None:
    """ThreestepError for texts, which no address is: it has no space before its first colon, unless it is a file."""
    for place, text in enumerate(addresses):
        if " " in text.partition(":")[0] and not os.path.exists(text):
            raise ThreestepError(
                f"rows expects dicts, paths or addresses, got the string {text!r:.60} at index {place}; to train on "
                "strings, pass dicts: [{'text': text} for text in texts]"
            )


def _written(rows: Any, folder: Path, stem: str, *, resumes: bool, name: str = ROWS) -> str:
    """Write rows, as Parquet of a dataset and JSON lines otherwise; return their address."""
    if is_dataset(rows):
        path, fresh = folder / f"{stem}.parquet", folder / f".{stem}.new"
        _made(folder)
        _plain_rows(rows).to_parquet(str(fresh))
        if resumes and path.is_file() and not _table(fresh).equals(_table(path)):
            raise _other_rows(path, name)
        fresh.replace(path)
        return f"parquet:{path}"
    pictures = PictureFolder(folder)
    text = "".join(f"{_line(row, f'{name}[{index}]', pictures)}\n" for index, row in enumerate(rows))
    path = folder / f"{stem}.jsonl"
    if resumes and path.is_file() and path.read_text(encoding="utf-8") != text:
        raise _other_rows(path, name)
    _made(folder)
    replace_file(path, text)
    return f"jsonl:{path}"


def _plain_rows(rows: Any) -> Any:
    """A dataset with the columns that it shows. ThreestepError if it computes rows as they are read."""
    shown = getattr(rows, "format", None) or {}
    if shown.get("type") == "custom":
        raise ThreestepError(
            "rows expects a datasets.Dataset without a transform, got one that uses set_transform; apply the transform "
            "first: rows.map(...)"
        )
    columns = shown.get("columns") or rows.column_names
    return rows if list(columns) == list(rows.column_names) else rows.with_format(None).select_columns(columns)


def _table(path: Path) -> Any:
    from pyarrow import parquet

    return parquet.read_table(path)


def _other_rows(path: Path, name: str) -> ThreestepError:
    run = path.parent.parent if path.stem == ROWS_FILE else path.parent.parent.parent
    return ThreestepError(
        f"{name} differ from those that the run in {run} started with ({path}); to resume it, pass the original ones, "
        "or use another output_dir"
    )


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
            raise ThreestepError(f"{setting}: two functions are named '{_name_of(function)}'; rename one of them")
        return address

    plain = _with_weights(settings)
    # TRL's name stays: with it, batches are counted as in TRL.
    funcs = _listed(plain.get(_REWARD_FUNCS))
    if any(map(callable, funcs)):
        plain[_REWARD_FUNCS] = [address_of(one, _REWARD_FUNCS) if callable(one) else one for one in funcs]
    for name, value in [*plain.items()]:
        if name == CALLBACK and value is not None and not isinstance(value, str):
            plugin_module("callback", "called").check_callback(value)
        if name == REWARD:
            plain[name] = _reward_text(value, address_of)
        elif callable(value) or isinstance(value, (Estimator, PolicyLoss)):
            plain[name] = address_of(value, name)
    return plain, functions


def _with_weights(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with TRL's reward_weights of functions in `reward`."""
    plain = dict(settings)
    functions = _listed(plain.get(REWARD))
    if plain.get(_REWARD_WEIGHTS) is not None and any(map(callable, functions)):
        weights = _listed(plain.pop(_REWARD_WEIGHTS))
        if len(weights) != len(functions):
            raise ThreestepError(
                f"{_REWARD_WEIGHTS} expects {len(functions)} weights, one per reward, got {len(weights)}"
            )
        plain[REWARD] = dict(zip(functions, weights, strict=True))
    return plain


def _reward_text(reward: Any, address_of: Callable[[Callable[..., Any], str], str]) -> str:
    """The value of --reward."""
    if isinstance(reward, str):
        return reward
    weights = reward if isinstance(reward, Mapping) else dict.fromkeys(_listed(reward), 1.0)
    if not weights:
        raise ThreestepError("reward expects a function, a name, a list of these or a dict of weights, got none")
    entries = []
    for one, weight in weights.items():
        if not isinstance(one, str) and not callable(one):
            raise ThreestepError(f"reward expects functions or names, got {_kind(one)}")
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


def _line(row: Mapping[str, Any], where: str, pictures: PictureFolder) -> str:
    plain = pictures.without_pictures(row, where)
    try:
        return json.dumps(plain, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError):
        for column, value in plain.items():
            try:
                json.dumps({column: value}, default=_plain)
            except (TypeError, ValueError) as problem:
                raise ThreestepError(
                    f"{where}['{column}'] expects text, numbers, lists or dicts, got {_kind(value)} ({problem})"
                ) from problem
        raise


def _plain(value: Any) -> Any:
    """A value of numpy as Python's; dates and decimals as text, as files have them. TypeError for others."""
    library = type(value).__module__.partition(".")[0]
    if library in ("numpy", "torch") and hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (datetime.date, datetime.time, decimal.Decimal)):
        return str(value)
    raise TypeError(f"Object of type {_kind(value)} is not JSON serializable")


def _file_address(function: Any, setting: str) -> str:
    """FILE.py:NAME of a function at the top of a module; ThreestepError for others."""
    name = _name_of(function)
    path = inspect.getsourcefile(inspect.unwrap(function)) if inspect.isroutine(function) else None
    nested = getattr(function, "__qualname__", "") != name
    if path is None or nested or function.__module__ == _MAIN or not os.path.isfile(path):
        raise ThreestepError(
            f"{setting}: with num_ranks, other processes import '{name}', so it must be a top-level function of an "
            f"importable file, but it is defined in {getattr(function, '__module__', 'no module')}; move it to such a "
            "file, or pass 'FILE.py:NAME'"
        )
    return f"{path}:{name}"


def _name_of(function: Any) -> str:
    function = getattr(function, "estimate", getattr(function, "loss", function))
    name = getattr(function, "__name__", type(function).__name__)
    return name if name.isidentifier() else "function"  # a lambda's is <lambda>


def _kind(value: Any) -> str:
    return type(value).__name__


def _made(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
