"""The imports of a package as a graph, read from source text alone: who imports whom, circles.

Modules go by dotted name; a package's own file ends in `.__init__`. Knows no rule of the house.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tests.support.sources import tree

Graph = Mapping[str, set[str]]
_IMPORTER = re.compile(r"\b(import_module|imported)$")  # functions that import a module by its name


class Import(NamedTuple):
    """One imported module.

    module: its dotted name. `from a import b` is reported as `a` and as `a.b`.
    line: of the import.
    eager: True where importing the importer runs it; False inside functions, under TYPE_CHECKING and in a main block.
    typing: under TYPE_CHECKING, for annotations alone.
    """

    module: str
    line: int
    eager: bool
    typing: bool = False


class _Found(NamedTuple):
    base: str
    names: tuple[str, ...]
    line: int
    eager: bool
    typing: bool = False


def plain_name(module: str) -> str:
    return module.removesuffix(".__init__")


def inside(module: str, place: str) -> bool:
    """True for `place` itself and everything below it."""
    return module == place or module.startswith(place + ".")


def imports(module: str, source: str) -> list[Import]:
    """Return every import in `source`, also by `import_module("a.b")` and `imported("a.b:name")`."""
    found = []
    for base, names, *rest in _statements(module, source):
        found.append(Import(base, *rest))
        found.extend(Import(f"{base}.{name}", *rest) for name in names)
    return found


def import_graph(sources: Mapping[str, str], eager_alone: bool = False) -> dict[str, set[str]]:
    """Return the modules of `sources` that each module imports.

    `from a import b` is an arrow to the module `a.b` where there is one, and to the package `a` otherwise. The packages
    above an imported module are no arrows: whoever runs inside a package has it loaded.
    """
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        arrows = set()
        for base, names, _, eager, _ in _statements(module, source):
            if eager_alone and not eager:
                continue
            for target in [f"{base}.{name}" for name in names] or [base]:
                arrows.add(_file_of(target, sources) or _file_of(base, sources))
        graph[module] = {target for target in arrows if target is not None and target != module}
    return graph


def closure(graph: Graph, module: str) -> set[str]:
    """Return a module with all that it imports, directly or not."""
    found, waiting = {module}, [module]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def circles(graph: Graph) -> list[list[str]]:
    """Return the modules that import themselves by way of others: a shortest circle of each knot."""
    return [_shortest_circle(graph, knot) for knot in _knots(graph) if len(knot) > 1]


@functools.cache
def _statements(module: str, source: str) -> tuple[_Found, ...]:
    texts = {"__name__": plain_name(module)}
    for node in tree(source).body:  # constants that the names of imported modules may be made of
        if isinstance(node, ast.Assign) and (text := _text(node.value, texts)) is not None:
            texts.update({ast.unparse(target): text for target in node.targets})
    return tuple(_walk(tree(source), module, texts, True))


def _text(node: ast.AST, texts: Mapping[str, str]) -> str | None:
    """Return the value of a text or an f-string of `texts`; None for anything else."""
    if isinstance(node, ast.JoinedStr):
        parts = [_text(part.value if isinstance(part, ast.FormattedValue) else part, texts) for part in node.values]
        return None if None in parts else "".join(map(str, parts))
    if isinstance(node, ast.Name):
        return texts.get(node.id)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _walk(node: ast.AST, module: str, texts: Mapping[str, str], eager: bool, typing: bool = False) -> Iterator[_Found]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        eager = False
    if isinstance(node, ast.If) and re.search("TYPE_CHECKING|__main__", ast.dump(node.test)):
        for child in node.body:
            yield from _walk(child, module, texts, False, "TYPE_CHECKING" in ast.dump(node.test))
        for child in node.orelse:
            yield from _walk(child, module, texts, eager, typing)
        return
    if isinstance(node, ast.Import):
        yield from (_Found(name.name, (), node.lineno, eager, typing) for name in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parts = module.split(".")
            parts = parts[: len(parts) - node.level + (module != plain_name(module))]
            base = ".".join([*parts, *filter(None, [node.module])])
        yield _Found(base, tuple(name.name for name in node.names), node.lineno, eager, typing)
    elif isinstance(node, ast.Call) and _IMPORTER.search(ast.unparse(node.func)) and node.args:
        name = _text(node.args[0], texts)
        if name is not None:
            yield _Found(name.partition(":")[0], (), node.lineno, eager, typing)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Plugin":  # names its modules by their addresses
        own = re.compile(re.escape(f"{plain_name(module)}.") + r"[\w.]+(:\w+)?")
        parts = (part for part in ast.walk(node) if isinstance(part, (ast.Constant, ast.JoinedStr)))
        for address in filter(own.fullmatch, (_text(part, texts) or "" for part in parts)):
            yield _Found(address.partition(":")[0], (), node.lineno, False)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, module, texts, eager, typing)


def _file_of(module: str, sources: Mapping[str, str]) -> str | None:
    return next((name for name in (module, f"{module}.__init__") if name in sources), None)


def _knots(graph: Graph) -> list[list[str]]:
    """Return the strongly connected components (Tarjan, SIAM J. Comput. 1972), those imported before importers."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    knots: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(graph[name] & graph.keys()):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            at = stack.index(name)
            knots.append(sorted(stack[at:]))
            del stack[at:]

    for name in sorted(graph):
        if name not in index:
            visit(name)
    return knots


def _shortest_circle(graph: Graph, knot: list[str]) -> list[str]:
    """Return a shortest way from the knot's first module back to it, both ends named."""
    paths = [[knot[0]]]
    for path in paths:
        for target in sorted(graph[path[-1]] & set(knot)):
            if target == knot[0]:
                return [*path, target]
            if all(target not in other for other in paths):
                paths.append([*path, target])
    raise AssertionError(f"{knot} is no knot")
