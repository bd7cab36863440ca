"""The library that the page holds comes from an installed package."""

from __future__ import annotations

import pytest

from threestep.plugins.report.pages import script


def test_the_library_is_d3_and_small():
    pytest.importorskip("mpld3", reason="needs the package mpld3: pip install mpld3")
    source = script.library()
    assert source is not None and source.startswith("// https://d3js.org") and len(source) < 2_000_000
    assert "</script" not in source.lower()


def test_without_the_package_there_is_none(monkeypatch):
    monkeypatch.setattr(script, "PACKAGE", "no_such_package")
    assert script.library() is None


def test_our_own_script_cannot_end_its_element_and_calls_no_other_site():
    assert "</script" not in script.SCRIPT.lower()
    assert script.SCRIPT.count("fetch(") == 1 and "fetch(`update?" in script.SCRIPT
    assert "eval(" not in script.SCRIPT and "new Function" not in script.SCRIPT
