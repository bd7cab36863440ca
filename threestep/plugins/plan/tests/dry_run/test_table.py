"""The table and the number of ranks of a dry run."""

from __future__ import annotations

import pytest

from threestep.plugins.plan.arguments import DryRunArguments
from threestep.plugins.plan.dry_run.table import most_at_once, print_memory, print_plan, ranks_of_dry_run
from training.utils.base.errors import ThreestepError
from training.utils.base.machine import MemoryLine, Moment
from training.utils.flags.arguments import parse_arguments
from training.utils.run.run_arguments import RunArguments


def test_ranks_are_those_asked_for_or_the_launchers_or_one(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert ranks_of_dry_run(None) == 1 and ranks_of_dry_run(8) == 8
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks_of_dry_run(None) == 4 and ranks_of_dry_run(8) == 8


def test_the_parts_add_up_to_the_totals():
    held = [MemoryLine("weights", 5, 1), MemoryLine("optimizer", 0, 7)]
    moments = [Moment("in a backward", (MemoryLine("a", 1), MemoryLine("b", 2, 4))), Moment("resting", ())]
    reached = most_at_once(held, moments)
    assert reached[0] == MemoryLine("most at once, in a backward", 8, 12)
    assert reached[1] == MemoryLine("most at once, resting", 5, 8)


def test_what_is_printed_adds_up_and_the_device_is_judged(capsys):
    gib = 2**30
    held = [MemoryLine("weights", 2 * gib, gib), MemoryLine("optimizer", 3 * gib)]
    print_memory(held, [Moment("x", (MemoryLine("a", gib),)), Moment("y", ())], lambda most: f"judged {most}")
    said = capsys.readouterr().out
    figures = {
        line.rsplit(None, 2)[0].strip(): line.split()[-2:] for line in said.splitlines()[2:-1] if "--" not in line
    }
    assert figures["held all the time"] == ["5.000", "1.000"] == figures["most at once, y"]
    assert figures["most at once, x"] == ["6.000", "1.000"] == figures["most at once"]
    assert said.endswith(f"judged {6 * gib}\n")


def test_only_the_first_rank_speaks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    print_plan("a.program", 2, {"seed": 1}, ["a sentence"])
    print_memory([MemoryLine("weights", 1)], [Moment("at work", ())], str)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--num_ranks", "8"], "--num_ranks 8 starts ranks behind `threestep` and scripts"),
        (["--dry_run", "true", "--ranks", "0"], "--num_ranks expects 1 or more, got 0"),
        (["--device", "cuda"], "--device expects --dry_run, got cuda without it"),
        (["--dry_run", "--device_memory_gb", "80", "--device", "cpu"], "--device_memory_gb 80.0 is a GPU's, and --dev"),
        (["--dry_run", "--device", "gpu"], "--device expects one of cpu, cuda, h100, "),
    ],
)
def test_mistakes(flags, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        parse_arguments((RunArguments, DryRunArguments), flags, "")
