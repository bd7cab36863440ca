"""The package `training` beside a `training` of the user's: a file or folder of that name where a program looks first.

There our modules are loaded as `threestep.training...`, and an import of `training` in them means these; everywhere
else it means the user's. Without such a file our package is `training`, and `threestep.training...` is another name of
the same modules, for extensions that do not know which it is.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

_NAME = "training"
_OURS = f"{__package__}.{_NAME}"
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PACKAGE = os.path.join(_ROOT, _NAME)
VARIABLE = "THREESTEP_APART"  # in the environment of ranks of a program that keeps apart
RUN = "--run"  # a program of the package, in the command line of such a rank


def keep_apart(first: str | None = None) -> None:
    """Load our modules under a name of their own, if `training` is the user's; otherwise let it name them too.

    first: a folder that the user's modules are looked up in first
    """
    if any(isinstance(finder, (_Finder, _SameModules)) for finder in sys.meta_path):
        return
    theirs = VARIABLE in os.environ or _is_theirs([*([] if first is None else [first]), *sys.path])
    sys.meta_path.insert(0, _Finder() if theirs else _SameModules())


def is_apart() -> bool:
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def loaded_name(module: str) -> str:
    """The name under which a module of ours, or of a plugin, is imported here."""
    return f"{__package__}.{module}" if is_apart() and module.partition(".")[0] == _NAME else module


def run_module(module: str, arguments: Sequence[str]) -> None:
    """Run `python -m MODULE ARGUMENTS` in this process, for a module of ours."""
    spec = importlib.util.find_spec(loaded_name(module))
    assert spec is not None and isinstance(spec.loader, SourceFileLoader), module
    if spec.submodule_search_locations is not None:
        return run_module(f"{module}.__main__", arguments)
    sys.argv = [module, *arguments]
    main = types.ModuleType("__main__")
    vars(main).update(__file__=spec.origin, __builtins__=_BUILTINS, __spec__=ModuleSpec(module, None))
    before, sys.modules["__main__"] = sys.modules["__main__"], main
    try:
        code: Any = spec.loader.get_code(spec.name)
        exec(code, vars(main))  # noqa: S102 - as runpy does
    finally:
        sys.modules["__main__"] = before


def _is_theirs(path: Sequence[str]) -> bool:
    known = sys.modules.get(_NAME)
    if known is not None:
        return not _is_our_folder(os.path.dirname(getattr(known, "__file__", None) or ""))
    for entry in path:
        folder = os.path.join(entry or os.getcwd(), _NAME)
        if _is_our_folder(folder):
            return False
        if os.path.isfile(f"{folder}.py") or _holds_modules(folder):
            return True
    return False


def _is_our_folder(folder: str) -> bool:
    return os.path.realpath(folder) == os.path.realpath(_PACKAGE)


def _holds_modules(folder: str) -> bool:
    try:
        return any(name.endswith(".py") for name in os.listdir(folder))
    except OSError:
        return False


class _Finder:
    """Finds our modules below this package, and the user's `training` without ours."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name == _NAME:
            return PathFinder.find_spec(name, [entry for entry in sys.path if not _is_root(entry)])
        if not name.startswith(f"{__package__}."):
            return None
        spec = PathFinder.find_spec(_NAME, [_ROOT]) if name == _OURS else PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
            return spec
        found = importlib.util.spec_from_file_location(
            name, spec.origin, loader=_Loader(name, spec.origin),
            submodule_search_locations=spec.submodule_search_locations,
        )  # fmt: skip
        return found


class _SameModules:
    """Finds `threestep.training...`: the modules of `training`."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name != _OURS and not name.startswith(f"{_OURS}."):
            return None
        plain = name.removeprefix(f"{__package__}.")
        return None if importlib.util.find_spec(plain) is None else ModuleSpec(name, _SameModule(plain))


class _SameModule(Loader):
    """Loads a module by another name of it."""

    def __init__(self, plain: str) -> None:
        self._plain = plain

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = importlib.import_module(self._plain)
        self._own = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self._own  # for which the import has put that of the other name


def _is_root(entry: str) -> bool:
    return os.path.realpath(entry or os.getcwd()) == os.path.realpath(_ROOT)


class _Loader(SourceFileLoader):
    """Runs a module whose imports of `training` are ours. Its compiled file is the one of other programs."""

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)["__builtins__"] = _BUILTINS
        super().exec_module(module)


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    *level: int,
) -> types.ModuleType:
    """Python's `__import__`, as our modules have it. level: of a relative import; statements give it last."""
    if any(level) or name.partition(".")[0] != _NAME:
        return builtins.__import__(name, globals, locals, fromlist, *level)
    module = importlib.import_module(f"{__package__}.{name}")
    if not fromlist:  # `import training.x` binds the name `training`
        return sys.modules[_OURS]
    return builtins.__import__(module.__name__, globals, locals, fromlist)


_BUILTINS = {**vars(builtins), "__import__": _import}
