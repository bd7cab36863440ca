"""A page of rows: masks where they belong, nothing but text of the data."""

from __future__ import annotations

from threestep.plugins.report.pages.rows_page import PageRow, rows_page

EVIL = "<script>alert(1)</script>"


def test_rows_stand_with_their_masks_and_nothing_of_them_is_code():
    rows = [
        PageRow(EVIL, [("text", [(EVIL, False), ("yes", True)])]),
        PageRow("b", [("prompt", [("p", False)])], [(EVIL, EVIL)]),
    ]
    page = rows_page(EVIL, [EVIL], rows, [(1, 5, 2)])
    assert "<script" not in page and "script-src" not in page
    assert page.count('class="card sample"') == 2 and "<mark>yes</mark>" in page
    assert "1 – 5" in page and 'class="lengths"' not in rows_page("", [], rows, [])
