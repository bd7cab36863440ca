"""Marks stand on what carries loss; texts stay texts."""

from __future__ import annotations

from threestep.plugins.report.pages.marked import marked_texts


def test_what_carries_loss_is_marked_and_escaped():
    html = marked_texts([("prompt", [("<b>", False)]), ("answer", [("a&b\n", True), ("c", False)])])
    assert "&lt;b&gt;" in html and "<b>" not in html
    assert '<mark>a&amp;b<i class="break"></i>\n</mark>c' in html
    assert html.count("<p class=soft>") == 2 and marked_texts([("x", [])]).count("<p") == 0
