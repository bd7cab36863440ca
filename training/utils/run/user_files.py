"""Python files of the user's: run once each, and what a flag such as `--checker FILE.py:NAME` names in them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

from training.utils.run.errors import ThreestepError, nearest_names

_loaded: dict[str, ModuleType] = {}


def is_address(given: str) -> bool:
    """Whether a flag's value has the form FILE.py:NAME."""
    return given.rpartition(":")[0].endswith(".py")


def check_address(given: str, flag: str) -> None:
    """Raise ThreestepError where `given` is no FILE.py:NAME or there is no such file; runs nothing."""
    path, _, name = given.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ThreestepError(f"{flag}: expected FILE.py:NAME, a Python file and a name in it, got '{given}'")
    if not os.path.isfile(os.path.expanduser(path)):
        raise ThreestepError(f"{flag}: there is no file '{path}'")


def load_named(given: str, flag: str) -> Any:
    """Return what NAME stands for in FILE.py; ThreestepError where the file has no such name or does not load."""
    check_address(given, flag)
    path, _, name = given.rpartition(":")
    module = load_module(path, flag)
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise ThreestepError(f"{flag}: '{path}' has no '{name}'{nearest_names(name, public)}")
    return getattr(module, name)


def load_function(given: str, flag: str) -> Any:
    """As `load_named`, for what can be called."""
    found = load_named(given, flag)
    if not callable(found):
        raise ThreestepError(f"{flag}: expected '{given}' to be a function, got {type(found).__name__}")
    return found


def load_module(path: str, flag: str) -> ModuleType:
    """Run a Python file; a file already loaded is not run again. ThreestepError where it is none or does not load."""
    real_path = os.path.realpath(os.path.expanduser(path))
    if real_path in _loaded:
        return _loaded[real_path]
    if not os.path.isfile(real_path) or not real_path.endswith(".py"):
        raise ThreestepError(f"{flag}: expected a Python file, got '{path}', which is none")
    stem = os.path.splitext(os.path.basename(real_path))[0]
    name = f"threestep_user_{stem}_{hashlib.sha256(real_path.encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, real_path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ThreestepError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        raise ThreestepError(f"{flag}: '{path}' does not load: {type(error).__name__}: {error}") from error
    _loaded[real_path] = module
    return module
