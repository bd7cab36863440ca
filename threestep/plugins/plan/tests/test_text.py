"""A plan's words."""

from __future__ import annotations

import yaml

from threestep.plugins.plan.curve import Point
from threestep.plugins.plan.failures import Losses
from threestep.plugins.plan.search import best_of, search
from threestep.plugins.plan.text import Terms, as_yaml, best_lines, curve_lines, losses_line, reasons


def test_reasons_name_what_each_other_value_would_do(wanted, estimates):
    tried = search(wanted(), estimates)
    assert list(reasons(tried[0], tried)) == [
        "with ZeRO-0, micro-batches of 4, recomputation: 2.000 s slower, most by recomputation (+3.000 s)",
        "with offload: 5.000 s slower, most by offload (+5.000 s)",
        "with recomputation: 3.000 s slower, most by recomputation (+3.000 s)",
        "with micro-batches of 2: 3.000 s slower, most by matmuls (+2.000 s)",
    ]


def test_money_is_hours_of_all_gpus(wanted, estimates):
    """7 seconds x 3,600 steps are 7 hours; 4 GPUs at 2.5 take 70."""
    here = wanted()
    tried = search(here, estimates)
    lines = best_lines(best_of(tried, here), tried, 4, Terms("h100", "step", 3600, 2.5))
    assert lines[0] == "1. ZeRO-3, micro-batches of 4: 7.000 s a step"
    assert lines[1] == "   7.00 hours, 28.0 of GPUs, 70.00 in money for 3,600 steps"
    assert "mostly: matmuls 86%, traffic 14%" in lines[2]
    assert sum(line.startswith(("2. ", "3. ")) for line in lines) == 2


def test_a_row_for_each_number_of_gpus(wanted, estimates):
    best = search(wanted(), estimates)[0]
    rows = curve_lines([Point(4, best), Point(32, None, "the batch has 16 sequences")], Terms("h100", "step", 3600))
    assert rows[1] == "      4 x h100: 7.00 hours, 28.0 of GPUs; ZeRO-3, micro-batches of 4; the cheapest"
    assert rows[2] == "     32 x h100: the batch has 16 sequences"
    assert rows[3] == "  limits, each where it first adds 5% to the cost: from 32 on the batch has 16 sequences"
    assert curve_lines([Point(32, None, "none")], Terms("h100", "step", 1)) == []


def test_a_run_with_failures_is_a_sentence():
    """10 steps of an hour on 2 GPUs, a tenth longer by slow nodes and another tenth by stops: 12 hours."""
    lost = Losses(5, 7200.0, 30.0, 0.1, 0.1)
    assert losses_line(lost, Terms("h100", "step", 10, 2.0), 3600.0, 2) == (
        "checkpoints: every 5 steps, 30 s each; a failure every 2.0 hours. Slow nodes add 10.0%, saves, failures and "
        "restarts 10.0%: 12.00 hours, 24.0 of GPUs, 48.00 in money"
    )
    assert "checkpoints: none before the end, " in losses_line(lost, Terms("h100", "step", 5), 3600.0, 2)


def test_the_file_holds_the_settings_and_its_command(wanted, estimates):
    best = search(wanted(), estimates)[0]
    text = as_yaml(best, "threestep sft --config plan.yaml --num_ranks 4")
    assert yaml.safe_load(text) == best.settings and "#   threestep sft --config plan.yaml" in text
