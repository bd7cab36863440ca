"""The table of kept libraries names every hand-written part, with lines that are about those of today."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.pages import ROOT

PAGE = ROOT / "docs" / "kept_libraries.md"
MOST_LINES = 100  # of a file that needs no row
CODE = ("training", "threestep", "docs/site")


def named_in(text: str) -> list[str]:
    return [path for path in re.findall(r"`([^`]+)`", text) if path.startswith(CODE)]


def parts() -> dict[str, tuple[list[str], int]]:
    """(files, lines) of each row that states lines."""
    cells = [line.strip("|").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    return {
        row[0].strip(): (named_in(row[1]), int(row[2].replace(",", "")))
        for row in cells
        if len(row) == 6 and "`" in row[1]
    }


def lines_of(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*.py") if "tests" not in file.parts]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def not_named(files: dict[str, int], named: list[str]) -> list[str]:
    """Those of more than MOST_LINES that are neither named nor in a folder that is."""
    return [
        name
        for name, lines in files.items()
        if lines > MOST_LINES and not any(name == path or name.startswith(f"{path}/") for path in named)
    ]


def test_every_long_file_is_named():
    named = named_in(PAGE.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []
    paths = [path for folder in CODE for end in ("py", "js") for path in (ROOT / folder).rglob(f"*.{end}")]
    files = {
        str(path.relative_to(ROOT)): lines_of(path) for path in paths if not {"__pycache__", "tests"} & {*path.parts}
    }
    assert len(files) > 300
    missing = not_named(files, named)
    assert not missing, f"docs/kept_libraries.md: name the library that could do it, or what it is for: {missing}"


def test_a_long_file_that_nobody_named_is_found():
    files = {"training/a/long.py": 101, "training/a/short.py": 100, "training/b.py": 500, "training/ab.py": 500}
    assert not_named(files, ["training/b.py"]) == ["training/a/long.py", "training/ab.py"]
    assert not_named(files, ["training/a", "training/b.py"]) == ["training/ab.py"]


def test_stated_lines_are_about_those_of_today():
    found = parts()
    assert len(found) > 20
    wrong = {
        part: (stated, now)
        for part, (paths, stated) in found.items()
        if not 0.6 < (now := sum(lines_of(ROOT / path) for path in paths)) / stated < 1.6
    }
    assert not wrong, f"docs/kept_libraries.md states other lines than there are (stated, now): {wrong}"
