"""The trees of folders in the documentation, compared with the folders.

A tree is a code block with a line `training/`. A line names files and folders (two spaces between several), then says
what they are; two spaces of indentation put it into the folder above.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.pages import blocks

_NAME = re.compile(r"\.?[\w.-]*(?:\.\w+|/|[A-Z]{4,})(?:[\w.-]+/)*")


def tree_of(page: str) -> str:
    """Return the text of the tree in a page."""
    return next(block.content for block in blocks(page) if re.search(r"^training/", block.content, re.MULTILINE))


def named_paths(tree: str) -> list[str]:
    """Return the paths that a tree names, relative to the checkout; a folder's ends in a slash."""
    paths = []
    above: list[tuple[int, str]] = [(-1, "")]  # indentation and path of the folders around a line
    for line in filter(str.strip, tree.splitlines()):
        indent = len(line) - len(line.lstrip())
        while above[-1][0] >= indent:
            above.pop()
        for name in re.split(r" {2,}", line.strip()):
            if not _NAME.fullmatch(name):
                break
            paths.append(above[-1][1] + name)
        if paths and paths[-1].endswith("/"):
            above.append((indent, paths[-1]))
    return paths


def tree_problems(tree: str, checkout: Path) -> list[str]:
    """Return what a tree names and is not there, and the rooms and steps of `training` that it does not name."""
    named = named_paths(tree)
    problems = [f"there is no {path}" for path in named if not (checkout / path).exists()]
    rooms = {path.parent.relative_to(checkout).as_posix() for path in (checkout / "training").rglob("*.py")}
    unnamed = {f"{room}/" for room in rooms - {"training", "training/utils"}} - set(named)
    return problems + [f"{room} is not in the tree" for room in sorted(unnamed)]
