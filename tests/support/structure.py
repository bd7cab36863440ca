"""The structure of a checkout as Markdown tables, read from its source text alone: `python -m tests.support.structure`.

    python -m tests.support.structure [CHECKOUT [MODULE ...]]   # default: this one; nothing of CHECKOUT is imported

Two checkouts are compared by running it on each. A room is a folder of `training/` with modules in it, an arrow is one
file that imports another, and floors are the modules in the longest chain of imports within a room. Closures are those
of the trainers, the contracts and the MODULEs given: all that importing one loads, with and without lazy imports and
those for annotations.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from tests.support.imports import circles, closure, floors, import_graph, inside, plain_name
from tests.support.rooms import CONTRACTS
from tests.support.sources import (
    Function,
    classes,
    declared_flags,
    fields_of_classes,
    fields_of_records,
    functions,
    is_docstring,
    modules,
    parameters,
    positional,
    statements,
    tree,
)

MAINS = ("training.step1_sft.main", "training.step2_reward.main", "training.step2_dpo.main")
REPEATED_LINES = 6
SETTINGS = ("Arguments", "Flags", "Settings")
# Words in code, docstrings and comments apart, by which a file knows of an optional part.
FEATURES = {
    "images": re.compile(r"image|picture|pixel|vision", re.IGNORECASE),
    "vLLM": re.compile("vllm", re.IGNORECASE),
    "routers": re.compile("router", re.IGNORECASE),
    "multi-token prediction": re.compile("mtp", re.IGNORECASE),
}


class Figure(NamedTuple):
    """The largest of something, and where it is."""

    number: int
    place: str

    def __str__(self) -> str:
        return f"{self.number} ({self.place})"


def room_of(module: str) -> str:
    """Return the folder that holds a module, as a path."""
    return module.rpartition(".")[0].replace(".", "/")


def code_lines(source: str) -> list[tuple[int, str]]:
    """Return (number, text without indentation) of the lines that are neither blank, comment, docstring nor import."""
    skipped = {
        line
        for node in ast.walk(tree(source))
        if isinstance(node, (ast.Import, ast.ImportFrom)) or is_docstring(node)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = ((number, line.strip()) for number, line in enumerate(source.splitlines(), 1) if number not in skipped)
    return [(number, line) for number, line in lines if line and not line.startswith("#")]


def repeated_places(sources: Mapping[str, str]) -> list[tuple[str, str, int]]:
    """Return pairs of places that hold the same REPEATED_LINES consecutive code lines or more: both places, lines.

    A pair is counted once however long it is.
    """
    lines = {module: code_lines(source) for module, source in sources.items()}
    windows: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for module, code in lines.items():
        for at in range(len(code) - REPEATED_LINES + 1):
            windows[tuple(text for _, text in code[at : at + REPEATED_LINES])].append((module, at))
    found = []
    for places in windows.values():
        for (one, here), (other, there) in combinations(places, 2):
            if here and there and lines[one][here - 1][1] == lines[other][there - 1][1]:
                continue  # the pair began before
            pairs = zip(lines[one][here:], lines[other][there:], strict=False)
            same = next((at for at, (left, right) in enumerate(pairs) if left[1] != right[1]), None)
            same = min(len(lines[one]) - here, len(lines[other]) - there) if same is None else same
            if one != other or there - here >= same:
                found.append((f"{one}:{lines[one][here][0]}", f"{other}:{lines[other][there][0]}", same))
    return found


def shared_percent(one: Sequence[str], other: Sequence[str]) -> float:
    """Return the lines that two files have in common, in percent of the shorter; blank lines are left out."""
    counts = [Counter(line.strip() for line in lines if line.strip()) for lines in (one, other)]
    return 100 * (counts[0] & counts[1]).total() / min(count.total() for count in counts)


def shared_by_mains(one: str, other: str) -> str:
    """Return what two sources share: of all their lines, and of their code lines."""
    of_code = shared_percent(*([text for _, text in code_lines(source)] for source in (one, other)))
    return (
        f"{shared_percent(one.splitlines(), other.splitlines()):.0f} %; {of_code:.0f} % without imports and docstrings"
    )


def longest_function(sources: Mapping[str, str]) -> Figure:
    return _largest((statements(node), module, name) for module, name, node, _ in _all_functions(sources))


def most_parameters(sources: Mapping[str, str]) -> Figure:
    return _largest((parameters(node, method), module, name) for module, name, node, method in _all_functions(sources))


def most_positional(sources: Mapping[str, str]) -> Figure:
    return _largest((positional(node, method), module, name) for module, name, node, method in _all_functions(sources))


def largest_settings(sources: Mapping[str, str]) -> Figure:
    """Return the fields of the largest class of flags or settings, those of its bases included."""
    counts = fields_of_classes(sources)
    return _largest_class(sources, {name: count for name, count in counts.items() if name.endswith(SETTINGS)})


def largest_record(sources: Mapping[str, str]) -> Figure:
    """Return the fields of the largest frozen dataclass or NamedTuple, settings apart, those of its bases included."""
    counts = fields_of_records(sources)
    return _largest_class(sources, {name: count for name, count in counts.items() if not name.endswith(SETTINGS)})


def closures_table(sources: Mapping[str, str], further: Sequence[str] = ()) -> list[str]:
    """Return the files and lines that the trainers, the contracts and the modules `further` need."""
    every, eager = import_graph(sources), import_graph(sources, eager_alone=True)
    trainers = [module for module in sources if re.fullmatch(r"training\.step\w+\.trainer", module)]
    contracts = [module for module in sources if any(inside(module, place) for place in CONTRACTS)]
    table = ["| module | files loaded | lines | files with lazy imports | lines |", "| --- | --- | --- | --- | --- |"]
    for module in [*trainers, *(name for name in contracts if name == plain_name(name)), *further]:
        cells = []
        for graph in (eager, every):
            needed = closure(graph, module)
            cells += [len(needed), sum(_lines(sources[name]) for name in needed)]
        table.append(f"| {module} | {' | '.join(map(str, cells))} |")
    return table


def features_table(sources: Mapping[str, str]) -> list[str]:
    """Return the files and rooms whose code has the words of an optional part."""
    table = ["| part | files | rooms | files of each room |", "| --- | --- | --- | --- |"]
    for feature, words in FEATURES.items():
        files = [module for module, source in sources.items() if words.search(code_text(source))]
        rooms = Counter(map(room_of, files))
        listed = ", ".join(f"{room.removeprefix('training/')} {count}" for room, count in rooms.most_common())
        table.append(f"| {feature} | {len(files)} | {len(rooms)} | {listed} |")
    return table


def code_text(source: str) -> str:
    """Return a source without its docstrings and the lines that are comments."""
    documented = {
        line
        for node in ast.walk(tree(source))
        if is_docstring(node)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = (line for number, line in enumerate(source.splitlines(), 1) if number not in documented)
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))


def largest_room(sources: Mapping[str, str]) -> Figure:
    """Return the modules of the largest room, its `__init__` apart."""
    sizes = Counter(room_of(module) for module in sources if module == plain_name(module))
    room, size = max(sizes.items(), key=lambda item: item[1])
    return Figure(size, room)


def flags_declared_twice(sources: Mapping[str, str]) -> int:
    return sum(len(found) > 1 for found in declared_flags(sources).values())


def rooms_table(sources: Mapping[str, str]) -> list[str]:
    graph = import_graph(sources)
    table = ["| room | files | lines | floors | arrows inside | arrows out |", "| --- | --- | --- | --- | --- | --- |"]
    for room in sorted({room_of(module) for module in sources}):
        members = {module for module in sources if room_of(module) == room}
        within = {module: graph[module] & members for module in members}
        inside = sum(map(len, within.values()))
        out = sum(len(graph[module]) for module in members) - inside
        lines = sum(_lines(sources[module]) for module in members)
        table.append(f"| {room} | {len(members)} | {lines} | {floors(within)} | {inside} | {out} |")
    return table


def figures_table(sources: Mapping[str, str]) -> list[str]:
    graph = import_graph(sources)
    across = [(one, other) for one, others in graph.items() for other in others if room_of(one) != room_of(other)]
    eager, every = circles(import_graph(sources, eager_alone=True)), circles(graph)
    rows = [
        ("lines of training/", sum(map(_lines, sources.values()))),
        ("rooms", len({room_of(module) for module in sources})),
        ("arrows between files", sum(map(len, graph.values()))),
        ("arrows between rooms", len(across)),
        ("rooms that import a room, pairs", len({(room_of(one), room_of(other)) for one, other in across})),
        ("circles when loaded", _listed(eager)),
        ("circles, with those inside functions and under type checking", _listed(every)),
        ("longest function, statements", longest_function(sources)),
        ("most parameters", most_parameters(sources)),
        ("most positional parameters", most_positional(sources)),
        ("fields of the largest settings class", largest_settings(sources)),
        ("fields of the largest record", largest_record(sources)),
        ("flags declared twice", flags_declared_twice(sources)),
        ("files of the largest room", largest_room(sources)),
        (f"pairs of places with {REPEATED_LINES} or more identical code lines", len(repeated_places(sources))),
    ]
    for one, other in combinations(MAINS, 2):
        names = " and ".join(main.split(".")[1] for main in (one, other))
        rows.append((f"lines shared by the mains of {names}", shared_by_mains(sources[one], sources[other])))
    return ["| figure | value |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]


def _all_functions(sources: Mapping[str, str]) -> Iterator[tuple[str, str, Function, bool]]:
    for module, source in sources.items():
        for name, node, is_method in functions(source):
            yield module, name, node, is_method


def _largest(found: Iterator[tuple[int, str, str]]) -> Figure:
    number, module, name = max(found, default=(0, "nowhere", "nothing"))
    return Figure(number, f"{plain_name(module)}: {name}")


def _largest_class(sources: Mapping[str, str], counts: Mapping[str, int]) -> Figure:
    places = {node.name: module for module, source in sources.items() for node in classes(source)}
    return _largest((count, places[name], name) for name, count in counts.items())


def _lines(source: str) -> int:
    return len(source.splitlines())


def _listed(found: list[list[str]]) -> str:
    return f"{len(found)}" + "".join(f"; {' -> '.join(circle)}" for circle in found)


def main() -> None:
    checkout = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    sources = modules(checkout / "training")
    parts = figures_table(sources), closures_table(sources, sys.argv[2:]), features_table(sources), rooms_table(sources)
    print("\n\n".join("\n".join(table) for table in parts))


if __name__ == "__main__":
    main()
