"""A new model from rows in memory."""

from __future__ import annotations

import pytest

import threestep

ROWS = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(5) for b in range(5)]


def test_a_model_of_rows_in_memory(tmp_path, monkeypatch, capfd):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    monkeypatch.chdir(tmp_path)
    logging.enable_progress_bar()
    folder = threestep.new_model(ROWS, "tiny", vocab_size=280, hidden_size=32, num_hidden_layers=1)
    assert folder == tmp_path / "tiny" and [path.name for path in tmp_path.iterdir()] == ["tiny"]
    said = capfd.readouterr()
    assert "new model: " in said.out and "shards" not in said.err and logging.is_progress_bar_enabled()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (32, 1) and len(tokenizer) <= 280


@pytest.mark.parametrize(
    ("rows", "settings", "sentence"),
    [
        (ROWS, {"vocab_size": 3}, "^vocab_size expects at least 25"),
        (ROWS, {"hidden_sise": 3}, "^unknown argument hidden_sise; did you mean 'hidden_size'"),
        (ROWS, {"hidden_size": 6}, "^hidden_size=6 does not divide into num_attention_heads=4 of an even width"),
        ([], {}, "^rows expects at least one row, got none$"),
    ],
)
def test_mistakes(rows, settings, sentence, tmp_path):
    with pytest.raises(threestep.ThreestepError, match=sentence):
        threestep.new_model(rows, tmp_path / "tiny", **settings)
    assert not (tmp_path / "tiny").exists()
