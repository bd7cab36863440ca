"""Objects that flags name: entries of tables, functions in a user's Python files (`--checker FILE.py:NAME`), each of
which is run once, and functions that a Python program gives its run (`given:NAME`). Cheap to import."""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

from training.utils.base.errors import ThreestepError, nearest_names

Returned = TypeVar("Returned")
Entry = TypeVar("Entry")
_loaded: dict[str, ModuleType] = {}

_HOME = __name__.partition(".utils.")[0]

GIVEN = "given:"  # before the name of a function that the caller of the run holds
_given: contextvars.ContextVar[Mapping[str, Callable[..., Any]] | None] = contextvars.ContextVar("given", default=None)


def loaded_name(address: str) -> str:
    """The address of a module, or of a name in one: of this package by the name under which it is loaded, which is
    another one beside a `training` of the user's (threestep/own_package.py)."""
    package = _HOME.rpartition(".")[2]
    is_ours = address.partition(".")[0] == package
    return f"{_HOME}{address.removeprefix(package)}" if is_ours else address


def named_object(address: str) -> Any:
    """Return the module or the object of an address of ours or of a plugin, MODULE or MODULE:NAME."""
    return pkgutil.resolve_name(loaded_name(address))


@contextlib.contextmanager
def functions_given(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside, flags may name these functions, by their keys: `given:NAME`."""
    token = _given.set(functions)
    try:
        yield
    finally:
        _given.reset(token)


def is_address(given: str) -> bool:
    """True if a flag's value has the form FILE.py:NAME, or given:NAME."""
    return given.rpartition(":")[0].endswith(".py") or given.startswith(GIVEN)


def check_address(given: str, flag: str) -> None:
    """Raise ThreestepError if `given` is not FILE.py:NAME or there is no such file, or if nobody gave given:NAME. Runs
    nothing."""
    if given.startswith(GIVEN):
        if given not in (_given.get() or {}):
            raise ThreestepError(
                f"{flag}: '{given}' was a function of the Python program that started the run; start the run from "
                "there again, or use FILE.py:NAME"
            )
        return
    path, _, name = given.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ThreestepError(f"{flag} expects FILE.py:NAME, a Python file and a name defined in it, got '{given}'")
    if not os.path.isfile(os.path.expanduser(path)):
        raise ThreestepError(f"{flag} expects an existing file, got '{path}'")


def load_named(given: str, flag: str) -> Any:
    """Return the object NAME of FILE.py; ThreestepError if the file has no such name or does not load."""
    check_address(given, flag)
    if given.startswith(GIVEN):
        return (_given.get() or {})[given]
    path, _, name = given.rpartition(":")
    module = load_module(path, flag)
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise ThreestepError(f"{flag}: '{path}' has no '{name}'{nearest_names(name, public)}")
    return getattr(module, name)


def load_function(given: str, flag: str) -> Any:
    """As `load_named`, for functions and other callables."""
    loaded = load_named(given, flag)
    if not callable(loaded):
        raise ThreestepError(f"{flag} expects a function, got '{given}', which is of type {type(loaded).__name__}")
    return loaded


def load_module(path: str, flag: str, package: str = "") -> ModuleType:
    """Run a Python file, once in a process. ThreestepError if it does not exist or does not load.

    The file's folder goes to the end of the path: it may import what lies beside it, and stands for no library.

    package: where the file's relative imports look
    """
    real_path = os.path.realpath(os.path.expanduser(path))
    folder = os.path.dirname(real_path)
    if real_path in _loaded:
        if folder not in sys.path:  # a Python program had its path restored after an earlier run
            sys.path.append(folder)
        return _loaded[real_path]
    if not os.path.isfile(real_path) or not real_path.endswith(".py"):
        why = "whose name does not end in .py" if os.path.isfile(real_path) else "which does not exist"
        raise ThreestepError(f"{flag} expects a Python file, got '{path}', {why}; correct the path")
    stem = os.path.splitext(os.path.basename(real_path))[0]
    name = (
        f"{package}{'.' if package else ''}threestep_user_{stem}_{hashlib.sha256(real_path.encode()).hexdigest()[:8]}"
    )
    spec = importlib.util.spec_from_file_location(name, real_path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except ThreestepError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        lines = [place.lineno for place in traceback.extract_tb(error.__traceback__) if place.filename == real_path]
        where = f" (line {lines[-1]})" if lines else ""
        raise ThreestepError(f"{flag}: '{path}' does not load: {type(error).__name__}: {error}{where}") from error
    _loaded[real_path] = module
    return module


def call_user(function: Callable[..., Returned], *arguments: Any, where: str = "") -> Returned:
    """Call a user's function; its exceptions become ThreestepErrors with their place. where: before the sentence."""
    try:
        return function(*arguments)
    except ThreestepError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ThreestepError(
            f"{where}{function.__qualname__} raised {type(error).__name__}: {error} ("
            f"{os.path.basename(place.filename)}, line {place.lineno})"
        ) from error


def imported(address: str) -> Callable[..., Any]:
    """Return a function that imports MODULE:NAME when it is called, so that a table costs nothing to import."""

    def call(*arguments: Any, **named: Any) -> Any:
        return named_object(address)(*arguments, **named)

    return call


def entry_named(flag: str, given: str, table: Mapping[str, Entry], kind: type[Entry], *, owner: str = "") -> Entry:
    """Return the table's entry of that name, or FILE.py's: an entry of this kind, or one made from a function.
    ThreestepError for anything else, which ends with `owner`, or with the nearest names."""
    if not is_address(given):
        if given not in table:
            near = owner or nearest_names(given, table)
            raise ThreestepError(f"{flag} expects one of {', '.join(table)} or FILE.py:NAME, got '{given}'{near}")
        return table[given]
    loaded = load_named(given, flag)
    return loaded if isinstance(loaded, kind) else kind(load_function(given, flag))  # type: ignore[call-arg]


def either(names: Iterable[str]) -> str:
    """Return 'a, b or c'."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def check_signature(function: Callable[..., Any], flag: str, given: str, parameters: Sequence[str]) -> None:
    """Raise ThreestepError if a user's function or class cannot be called with these arguments, by position."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have none
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise ThreestepError(
            f"{flag} expects a {'class' if isinstance(function, type) else 'function'} of ({', '.join(parameters)}), "
            f"got '{given}', which takes {signature}: {error}"
        ) from error
