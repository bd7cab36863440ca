"""Which plugins a test needs: those that it imports, itself or by way of other files of `tests`."""

from __future__ import annotations

import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "threestep" / "plugins"
_IMPORT = re.compile(r"^\s*(?:from|import) ((?:threestep\.plugins|tests)[\w.]*)(?: import ([\w, ]+))?", re.MULTILINE)


def missing_plugins(test: Path) -> set[str]:
    return {name for name in _needed(test) if not (PLUGINS / name / "__init__.py").is_file()}


@functools.cache
def _needed(file: Path) -> frozenset[str]:
    found, waiting, seen = set[str](), [file], {file}
    while waiting:
        for module in _imports(waiting.pop()):
            parts = module.split(".")
            if parts[:2] == ["threestep", "plugins"]:
                found |= {*parts[2:3]}
                continue
            other = ROOT.joinpath(*parts).with_suffix(".py")
            if other.is_file() and other not in seen:
                seen.add(other)
                waiting.append(other)
    return frozenset(found)


@functools.cache
def _imports(file: Path) -> tuple[str, ...]:
    found = []
    for place, names in _IMPORT.findall(file.read_text(encoding="utf-8")):
        found += [place, *(f"{place}.{name.strip().split(' ')[0]}" for name in names.split(",") if name.strip())]
    return tuple(found)
