"""What a call is given in memory, as files that a run reads: rows, models, functions.

A run knows paths and names alone, so that it can be resumed, launched on ranks and repeated from its config.yaml.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from training.utils.run.errors import ThreestepError
from training.utils.run.user_files import GIVEN

ROWS = "given_rows"
REWARD = "reward"
_MAIN = "__main__"


def address_of_rows(rows: Any, folder: Path) -> list[str]:
    """Return what --data_path takes for `rows`; those in memory are written to `folder`.

    rows: a path, an address or a registered name; several of them; dicts; or a datasets.Dataset

    Raises ThreestepError for anything else, and for values that JSON does not have.
    """
    if isinstance(rows, (str, os.PathLike)):
        return [_with_reader(os.fspath(rows))]
    if isinstance(rows, Sequence) and rows and all(isinstance(row, (str, os.PathLike)) for row in rows):
        return [_with_reader(os.fspath(row)) for row in rows]
    if hasattr(rows, "to_parquet") and hasattr(rows, "column_names"):
        path = folder / f"{ROWS}.parquet"
        _made(folder)
        rows.to_parquet(str(path))
        return [f"parquet:{path}"]
    if not isinstance(rows, Sequence) or not all(isinstance(row, Mapping) for row in rows):
        several = f" with the splits {', '.join(map(str, rows))}; give one of them" if isinstance(rows, Mapping) else ""
        raise ThreestepError(
            f"rows expects a list of dicts, a datasets.Dataset, a path or an address, got {_kind(rows)}{several}"
        )
    if not rows:
        raise ThreestepError("rows expects at least one row, got an empty list")
    lines = [_line(row, index) for index, row in enumerate(rows)]
    path = folder / f"{ROWS}.jsonl"
    _made(folder)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return [f"jsonl:{path}"]


def is_in_memory(rows: Any) -> bool:
    """Whether `rows` are rows themselves, of which the run trains on all; a path's are shared by --data_split."""
    several = isinstance(rows, Sequence) and bool(rows) and isinstance(rows[0], (str, os.PathLike))
    return not isinstance(rows, (str, os.PathLike)) and not several


def path_of_model(model: Any, tokenizer: Any, folder: Path, name: str) -> str:
    """Return a path or hub name as it is; a loaded model is saved with its tokenizer to `folder` / `name`.

    Raises ThreestepError for what is neither, a model without a tokenizer, and one that cannot be saved as a whole.
    """
    if isinstance(model, (str, os.PathLike)):
        if tokenizer is not None:
            raise ThreestepError(f"tokenizer goes with a loaded model, and {name} is '{model}', whose own is read")
        return os.fspath(model)
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        raise ThreestepError(f"{name} expects a path, a hub name or a loaded transformers model, got {_kind(model)}")
    if hasattr(model, "peft_config"):
        raise ThreestepError(
            f"{name} expects a whole model, got one with adapters ({_kind(model)}): merge them first "
            "(model.merge_and_unload()), or save the adapter and give its folder"
        )
    if getattr(model, "is_quantized", False):
        raise ThreestepError(f"{name} expects unquantized weights, got a quantized {_kind(model)}; give its path")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ThreestepError(
            f"{name} expects weights, got a {_kind(model)} on the meta device; load it, or give a path"
        )
    if tokenizer is None:
        raise ThreestepError(f"{name} is a loaded model, and tokenizer expects its tokenizer, got None")
    path = folder / name
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


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
    """What --reward takes."""
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
