"""The environments that there are: in Python files, read as text, and in installed packages."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from threestep.plugins.environments.addresses import installed_environments
from training.utils.base.errors import ThreestepError

_METHODS = {"reset", "step", "close"}
_ADAPTERS = {"OpenEnvironment", "GymnasiumEnvironment", "DrivenEnvironment"}  # classes that have the methods
_LEFT_OUT = {"__pycache__", "node_modules", "site-packages", "venv"}


class Listed(NamedTuple):
    """address: as --environment takes it. about: the first line of its docstring, or where it comes from."""

    address: str
    about: str


def listed(places: Sequence[str]) -> list[Listed]:
    """The environments of these files and folders, and of installed packages. Runs no file."""
    found = [each for place in places for file in _files(Path(place).expanduser()) for each in _of_file(file)]
    packaged = [Listed(name, f"installed: {entry.value}") for name, entry in installed_environments().items()]
    return found + packaged


def _files(place: Path) -> list[Path]:
    if place.is_file() and place.suffix == ".py":
        return [place]
    if not place.is_dir():
        raise ThreestepError(f"threestep inspect env list expects Python files and folders, got '{place}'")
    inside = (path for path in place.rglob("*.py"))
    return sorted(path for path in inside if not any(_is_left_out(part) for part in path.relative_to(place).parts))


def _is_left_out(part: str) -> bool:
    return part in _LEFT_OUT or part.startswith(".")


def _of_file(path: Path) -> Iterator[Listed]:
    """Classes with the methods of an environment, their own or those of bases in the same file."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    for name, node in classes.items():
        if not name.startswith("_") and _METHODS <= _methods(node, classes, ()):
            about = (ast.get_docstring(node) or "").partition("\n")[0]
            yield Listed(f"{path}:{name}", about)


def _methods(node: ast.ClassDef, classes: dict[str, ast.ClassDef], seen: tuple[str, ...]) -> set[str]:
    if any(ast.unparse(base) == "Protocol" for base in node.bases):
        return set()
    names = {each.name for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))}
    for base in node.bases:
        base_name = ast.unparse(base).rpartition(".")[2]
        if base_name in _ADAPTERS:
            names |= _METHODS
        elif base_name in classes and base_name not in seen:
            names |= _methods(classes[base_name], classes, (*seen, base_name))
    return names
