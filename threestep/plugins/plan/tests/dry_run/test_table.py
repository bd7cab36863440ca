"""The table and the number of ranks of a dry run."""

from __future__ import annotations

import pytest

from threestep.plugins.plan.arguments import DryRunArguments
from threestep.plugins.plan.dry_run.table import most_at_once, ranks_of_dry_run
from training.utils.base.errors import ThreestepError
from training.utils.base.memory import MemoryLine, Moment
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
