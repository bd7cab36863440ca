"""A result as a notebook shows it."""

from __future__ import annotations

from tests.support.tiny_models import tiny_causal_lm
from threestep.result import Result


def test_without_a_run_there_are_figures_alone(tmp_path):
    shown = Result("sft", tmp_path / "<gone>", {"eval_loss_after": 1.25, "seconds": None})._repr_html_()
    assert "<td>eval_loss_after</td><td>1.25</td>" in shown and "seconds" not in shown and "<img" not in shown
    assert "&lt;gone&gt;" in shown


def test_the_report_is_named(tmp_path):
    result = Result("sft", tmp_path, {})
    assert result.report is None and f"sft, in {tmp_path}<" in result._repr_html_()
    (tmp_path / "report.html").write_text("")
    assert result.report == tmp_path / "report.html" and f"sft, in {result.report}<" in result._repr_html_()


def test_a_model_loads_without_bars(tmp_path, capfd, tiny_tokenizer):
    from transformers.utils import logging

    tiny_causal_lm("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    shown = logging.is_progress_bar_enabled()
    try:
        logging.enable_progress_bar()
        capfd.readouterr()
        assert Result("sft", tmp_path, {}).model.config.model_type == "llama"
        assert "Loading weights" not in capfd.readouterr().err and logging.is_progress_bar_enabled()
    finally:
        if not shown:
            logging.disable_progress_bar()
