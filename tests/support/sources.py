"""The source text of a package: its modules, and what their functions and classes are made of. Imports none of it."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def tree(source: str) -> ast.Module:
    return ast.parse(source)


def modules(package: Path) -> dict[str, str]:
    """Return the source of every module below `package`, by dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        found[name] = path.read_text(encoding="utf-8")
    return found


def functions(source: str) -> Iterator[tuple[str, Function, bool]]:
    """Yield each function with its name (a method's with its class) and whether it has a self or cls."""

    def visit(node: ast.AST, name: str, in_class: bool) -> Iterator[tuple[str, Function, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                static = any(ast.unparse(decorator) == "staticmethod" for decorator in child.decorator_list)
                yield f"{name}{child.name}", child, in_class and not static
                yield from visit(child, f"{name}{child.name}.", False)
            elif isinstance(child, ast.ClassDef):
                yield from visit(child, f"{name}{child.name}.", True)
            else:
                yield from visit(child, name, in_class)

    return visit(tree(source), "", False)


def statements(function: Function) -> int:
    """Return the statements in a function, those of the functions in it too, without docstrings and its own `def`."""
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
    return sum(not is_docstring(node) for node in nodes) - 1


def parameters(function: Function, is_method: bool) -> int:
    """Return the parameters of a function, self and cls not counted."""
    takes = function.args
    named = len(takes.posonlyargs) + len(takes.args) + len(takes.kwonlyargs)
    return named + (takes.vararg is not None) + (takes.kwarg is not None) - is_method


def is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def declared_flags(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Return each flag that a `flag(...)` declares, by name, with the modules that do: as a field of a class, or as a
    (name, type, field) for `make_dataclass`."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, source in sources.items():
        for node in ast.walk(tree(source)):
            if isinstance(node, ast.AnnAssign) and _is_flag(node.value):
                places[ast.unparse(node.target)].append(module)
            elif isinstance(node, ast.Tuple) and len(node.elts) == 3 and _is_flag(node.elts[2]):
                places[ast.literal_eval(node.elts[0])].append(module)
    return places


def _is_flag(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "flag"
