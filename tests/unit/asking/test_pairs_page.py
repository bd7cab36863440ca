"""The page escapes what models write, and marks the better answer."""

from __future__ import annotations

from training.asking.pairs_page import page


def test_the_page():
    samples = [
        {"prompt": "a < b?", "answers": ["<script>x</script>", "no"], "scores": [1.0, 0.5], "ground_truth": "no"},
        {"prompt": "c", "answers": ["1", "2"], "scores": [0.5, 0.5], "ground_truth": None},
    ]
    text = page("win_rate", {"win_rate": "0.5"}, ["A", "B"], samples)
    assert "<script>" not in text and "&lt;script&gt;x&lt;/script&gt;" in text and "a &lt; b?" in text
    assert text.count('class="answer best"') == 1  # a tie marks none
    assert text.count("expected: no") == 1
    assert "http:" not in text and "https:" not in text and "script-src" not in text
