"""The script of the report: draws the charts with D3 (https://d3js.org), zooms them, and follows a run.

D3 comes from the installed package mpld3, which carries it in one file (BSD licence); nothing is fetched.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGE = "mpld3"
_FILE = "js/d3.v5.min.js"  # 238 kB

SCRIPT = Path(__file__).with_name("report.js").read_text(encoding="utf-8")


def library() -> str | None:
    """The source of D3; None if the package that carries it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)  # importing it would load matplotlib
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / _FILE
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None
