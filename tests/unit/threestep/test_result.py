"""A result as a notebook shows it."""

from __future__ import annotations

from threestep.result import Result


def test_without_a_run_there_are_figures_alone(tmp_path):
    shown = Result("sft", tmp_path / "<gone>", {"eval_loss_after": 1.25, "seconds": None})._repr_html_()
    assert "<td>eval_loss_after</td><td>1.25</td>" in shown and "seconds" not in shown and "<img" not in shown
    assert "&lt;gone&gt;" in shown
