"""The library that the page holds comes from an installed package."""

from __future__ import annotations

from threestep.plugins.report.pages import script


def test_our_own_script_cannot_end_its_element_and_calls_no_other_site():
    assert "</script" not in script.SCRIPT.lower()
    assert script.SCRIPT.count("fetch(") == 1 and "fetch(`update?" in script.SCRIPT
    assert "eval(" not in script.SCRIPT and "new Function" not in script.SCRIPT
