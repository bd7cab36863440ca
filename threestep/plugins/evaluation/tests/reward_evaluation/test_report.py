"""An evaluation as lines to read."""

from __future__ import annotations

from tests.unit.utils.preference.test_evaluation import BY_HAND, scored
from threestep.plugins.evaluation.reward_evaluation.report import report_text
from training.utils.preference.evaluation import evaluate


def test_every_part_is_told():
    text = report_text(evaluate(BY_HAND))
    assert text.startswith("5 pairs of 3 prompts: accuracy 0.600 (1 ties), mean score gap 1.000, loss ")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert any(line.startswith("chosen 3 1.167 0.624 ") for line in lines)
    assert "-33 or less 2 1.000" in lines and "-8 to -1 2 0.500" in lines and "0 1 0.000" in lines
    assert "33 or more 0 -" in lines
    assert "0.50 to 0.55 1 0.500 0.500" in lines
    assert any(line.startswith("expected calibration error 0.") for line in lines)
    # The scores 0.5, 1 and 2 of chosen, and -1, 0, 1, 1.5 of rejected; one score is a whole bar.
    bars = [line for line in lines if "|" in line and "#" in line]
    assert len(bars) == 6 and bars[0].startswith("-1.000 0 1 | ####")
    assert all(line == line.rstrip() for line in text.splitlines())


def test_nothing_to_tell_is_no_error():
    assert report_text(evaluate(scored())).startswith("0 pairs of 0 prompts: accuracy -")
