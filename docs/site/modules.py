"""The reference of the Python code: a page for each folder of modules, from their docstrings."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "reference/modules"
PACKAGES = ("threestep", "training")


def pages() -> dict[str, str]:
    """Return a page for each folder of modules, and the list of them."""
    rooms: dict[str, list[str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "tests" in path.parts:  # of a plugin
                continue
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            room = module if path.name == "__init__.py" else module.rpartition(".")[0]
            if path.name != "__main__.py":
                rooms.setdefault(room, []).append(module)
    rooms = {room: sorted(modules) for room, modules in sorted(rooms.items()) if _holds_code(modules)}
    found = {f"{FOLDER}/{room}.md": _page(room, modules) for room, modules in rooms.items()}
    lines = [
        "# Python modules",
        "",
        "A page for each folder of the packages, made from the docstrings. [The design](../../design.md) says which",
        "folder may import which.",
        "",
        "| folder | what it is |",
        "| --- | --- |",
        *(f"| [{room}]({room}.md) | {_cell(_first_line(room))} |" for room in rooms),
        "",
        "```{toctree}",
        ":hidden:",
        "",
        *rooms,
        "```",
        "",
    ]
    return {f"{FOLDER}/index.md": "\n".join(lines), **found}


def _page(room: str, modules: list[str]) -> str:
    lines = [f"# {room}", ""]
    for module in modules:
        if module != room:
            lines += [f"## {module.rpartition('.')[2]}", ""]
        # What a package passes on is described where it is made.
        own_alone = ["    :ignore-module-all:"] * (module == room)
        lines += ["```{eval-rst}", f".. automodule:: {module}", "    :members:", *own_alone, "```", ""]
    return "\n".join(lines)


def _holds_code(modules: list[str]) -> bool:
    return any(_tree(module).body for module in modules)


def _first_line(module: str) -> str:
    return (ast.get_docstring(_tree(module)) or "").split("\n")[0]


def _tree(module: str) -> ast.Module:
    place = ROOT.joinpath(*module.split("."))
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
