"""Stand-ins for packages that a module imports at its top and that the functions under test never call (vLLM,
flash-attn): everything under their names is an empty module."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Kind(type):
    """What is asked of a class is a class too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kind(name, (_Thing,), {})


class _Thing(metaclass=_Kind):
    """Any class or decorator: called, it gives back what it was given, or something that does."""

    def __new__(cls, *given: Any, **named: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) else lambda function: function


class _Empty(ModuleType):
    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kind(name, (_Thing,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = set(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to do."""


def stub(*names: str) -> None:
    """Let imports of these packages, wherever they are not installed, find empty modules."""
    sys.meta_path.append(_Finder(names))
