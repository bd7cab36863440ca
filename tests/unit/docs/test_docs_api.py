"""`make api`: a page for each module, from its docstrings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_pages_hold_the_docstrings(tmp_path):
    pdoc = pytest.importorskip("pdoc", reason="pdoc of the extra `test` is not installed")
    pdoc.pdoc("training.utils.run.errors", "training.utils.layout.planner", output_directory=tmp_path)
    assert (tmp_path / "index.html").is_file()
    page = (tmp_path / "training" / "utils" / "layout" / "planner.html").read_text()
    words = re.sub(r"<[^>]+>", "", page)
    assert "plan_step" in words and "Lay out the documents of one optimizer step" in words


def test_make_builds_the_whole_package_where_git_looks_away():
    made = re.search(r"^api:\n\t(.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert made is not None and "-m pdoc --output-directory docs/api training" in made[1]
    assert "docs/api/" in (ROOT / ".gitignore").read_text().splitlines()
