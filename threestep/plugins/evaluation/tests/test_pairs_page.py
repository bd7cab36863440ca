"""The page escapes what models write, and marks the better answer."""

from __future__ import annotations

from threestep.plugins.evaluation import pairs_page
from threestep.plugins.evaluation.pairs_page import page


def test_the_page(tmp_path):
    samples = [
        {"prompt": "a < b?", "answers": ["<script>x</script>", "no"], "scores": [1.0, 0.5], "ground_truth": "no"},
        {"prompt": "c", "answers": ["1", "2"], "scores": [0.5, 0.5], "ground_truth": None},
    ]
    text = page("win_rate", {"win_rate": "0.5"}, ["A", "B"], samples, folder=tmp_path)
    assert "<script>" not in text and "&lt;script&gt;x&lt;/script&gt;" in text and "a &lt; b?" in text
    assert text.count('class="answer best"') == 1  # a tie marks none
    assert text.count("expected: no") == 1
    assert "http:" not in text and "https:" not in text and "script-src" not in text


def test_pictures_stand_below_the_prompt_until_the_page_has_enough(tmp_path, monkeypatch):
    (tmp_path / "sample_pictures").mkdir()
    (tmp_path / "sample_pictures" / f"{'c' * 64}.png").write_bytes(b"a picture")
    sample = {"prompt": "p", "images": ["c" * 64], "answers": ["1"], "scores": [1.0], "ground_truth": None}
    text = page("reward", {}, ["A"], [sample, sample], folder=tmp_path)
    assert text.count('<img src="data:image/png;base64,YSBwaWN0dXJl" alt="image 1 of 1">') == 2
    monkeypatch.setattr(pairs_page, "_MOST_BYTES", 10)
    text = page("reward", {}, ["A"], [sample, sample], folder=tmp_path)
    assert text.count("<img") == 1 and text.count("1 image not shown") == 1
