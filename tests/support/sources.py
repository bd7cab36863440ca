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
    takes = function.args
    named = len(takes.posonlyargs) + len(takes.args) + len(takes.kwonlyargs)
    return named + (takes.vararg is not None) + (takes.kwarg is not None) - is_method


def positional(function: Function, is_method: bool) -> int:
    """Return the parameters that a call may give by their place, self and cls not counted."""
    return len(function.args.posonlyargs) + len(function.args.args) - is_method


def classes(source: str) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree(source)) if isinstance(node, ast.ClassDef))


def fields_of_classes(sources: Mapping[str, str]) -> dict[str, int]:
    """Return the annotated fields of each class by its name, those of its bases among `sources` included."""
    by_name = {node.name: node for source in sources.values() for node in classes(source)}

    def count(node: ast.ClassDef) -> int:
        own = sum(isinstance(line, ast.AnnAssign) and "ClassVar" not in ast.unparse(line) for line in node.body)
        bases = {_last_name(base) for base in node.bases} & by_name.keys() - {node.name}
        return own + sum(count(by_name[base]) for base in bases)

    return {name: count(node) for name, node in by_name.items()}


def fields_of_records(sources: Mapping[str, str]) -> dict[str, int]:
    """Return the fields of each frozen dataclass and NamedTuple by its name, those of its bases included."""
    counts = fields_of_classes(sources)
    found = (node for source in sources.values() for node in classes(source))
    return {node.name: counts[node.name] for node in found if _is_record(node)}


def _is_record(node: ast.ClassDef) -> bool:
    frozen = any("dataclass" in (text := ast.unparse(line)) and "frozen=True" in text for line in node.decorator_list)
    return frozen or any(_last_name(base) == "NamedTuple" for base in node.bases)


def _last_name(base: ast.expr) -> str:
    return ast.unparse(base).partition("[")[0].rpartition(".")[2]


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
