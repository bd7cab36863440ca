"""The table and the number of ranks of a dry run."""

from __future__ import annotations

import pytest

from training.utils.dry_run.table import MemoryLine, peak, print_memory, print_plan, ranks_of_dry_run
from training.utils.run.arguments import parse_arguments
from training.utils.run.errors import ThreestepError
from training.utils.run.run_arguments import RunArguments


def test_ranks_are_those_asked_for_or_the_launchers_or_one(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert ranks_of_dry_run(None) == 1 and ranks_of_dry_run(8) == 8
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert ranks_of_dry_run(None) == 4 and ranks_of_dry_run(8) == 8


def test_lines_are_in_gib_and_those_without_bytes_are_left_out(capsys):
    lines = [MemoryLine("weights", 3 * 2**29, 2**30), MemoryLine("nothing", 0, 0)]
    print_memory(lines, [MemoryLine("most at once", 20 * 2**30, 0)])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["weights", "1.500", "1.000"] in rows and ["most", "at", "once", "20.0", "-"] in rows
    assert not any("nothing" in row for row in rows)


def test_a_peak_adds_the_worst_moment_to_what_is_held():
    held = [MemoryLine("weights", 5, 1), MemoryLine("optimizer", 0, 7)]
    assert peak(held, 3) == MemoryLine("most at once", 8, 8)


def test_only_the_first_rank_speaks(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    print_plan("a.program", 2, {"seed": 1}, ["a sentence"])
    print_memory([], [MemoryLine("most at once", 1, 0)])
    assert capsys.readouterr().out == ""


def test_settings_and_sentences_are_said(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    print_plan("a.program", 2, {"seed": 1}, ["a sentence"])
    said = capsys.readouterr().out
    assert "dry run of a.program on 2 ranks" in said and "  seed: 1\n" in said and said.endswith("a sentence\n")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--num_ranks", "8"], "--num_ranks expects --dry_run, got 8 without it"),
        (["--dry_run", "true", "--ranks", "0"], "--num_ranks expects 1 or more, got 0"),
    ],
)
def test_mistakes(flags, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        parse_arguments((RunArguments,), flags, "")
