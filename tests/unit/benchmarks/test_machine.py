"""What else the machine did during a run, from made-up counters; which rounds are quoted."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys

import pytest

import benchmarks.__main__ as program
from benchmarks.competitions import Competition
from benchmarks.machine import MOST_DISTURBED, Counters, Load, closing_line, load_between, read_counters, undisturbed

QUIET, BUSY = Load(0.01, 0.0), Load(0.2, 0.0)


def test_others_are_what_was_busy_and_not_our_own():
    """Two cores for 10 s: 12 s busy, 9 of them our own, 1 s stolen."""
    load = load_between(Counters(500.0, 100.0, 7.0, 30.0), Counters(520.0, 112.0, 8.0, 39.0))
    assert load == Load(others=pytest.approx(3 / 20), stolen=pytest.approx(1 / 20))
    assert str(load) == "others 15.0 % of the cores, steal 5.0 %"
    # Own time is measured, ticks are sampled: never below zero.
    assert load_between(Counters(0.0, 0.0, 0.0, 0.0), Counters(20.0, 9.9, 0.0, 10.0)) == Load(0.0, 0.0)
    assert load_between(None, None) is None


def test_counters_of_proc_stat(tmp_path):
    stat = tmp_path / "stat"
    # user nice system idle iowait irq softirq steal guest guest_nice; guests are within user and nice.
    ticks = [100, 20, 30, 1000, 40, 5, 6, 7, 50, 10]
    stat.write_text(f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    second = os.sysconf("SC_CLK_TCK")
    counters = read_counters(stat)
    assert counters is not None
    assert counters[:3] == pytest.approx((1208 / second, 161 / second, 7 / second))
    assert read_counters(tmp_path / "missing") is None


def test_own_time_includes_ended_children(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu 1 1 1 1 1 1 1 1 0 0\n")
    before = read_counters(stat)
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)
    after = read_counters(stat)
    assert before and after and after.own - before.own >= 0.28


def test_a_round_with_one_disturbed_run_is_not_quoted():
    rounds = [[QUIET, QUIET], [QUIET, BUSY], [QUIET, Load(0.03, 0.03)], [None, QUIET]]
    assert undisturbed(rounds, MOST_DISTURBED) == [0, 3]
    assert undisturbed(rounds, 0.5) == [0, 1, 2, 3]


def test_a_claim_takes_three_undisturbed_rounds():
    quiet, disturbed = [QUIET, QUIET], [QUIET, BUSY]
    assert closing_line([quiet] * 3 + [disturbed], 0.05) == (
        "3 of 4 rounds undisturbed (others and steal at most 5 % of the cores)"
    )
    assert closing_line([quiet] * 2 + [disturbed], 0.05).endswith(": nothing is claimed, which takes 3")
    assert closing_line([quiet] * 2 + [[QUIET, None]], 0.05).startswith("nothing is claimed: there is no /proc/stat")


def reported(tmp_path, capsys, *rounds: tuple[float, Load | None]) -> tuple[str, dict]:
    """The report of two competitors: ours runs at 2 a second, the other at each round's rate under its load."""
    arguments = argparse.Namespace(
        name="sft", shape="tiny", dtype="bf16", threads=2, rounds=len(rounds), most_disturbed=0.05, folder=str(tmp_path)
    )
    runs = {
        "ours": [program.Measured([2.0, 2.0], 10**9, [{}, {}], QUIET) for _ in rounds],
        "other": [program.Measured([rate, rate], 10**9, [{}, {}], load) for rate, load in rounds],
    }
    program._report(arguments, Competition("token", {"ours": [], "other": []}, ["a note"]), runs, {})
    return capsys.readouterr().out, json.loads((tmp_path / "sft_tiny_bf16.json").read_text())


def test_the_report_quotes_undisturbed_rounds_alone(tmp_path, capsys):
    printed, kept = reported(tmp_path, capsys, (1.0, QUIET), (0.1, BUSY), (1.6, QUIET), (1.25, QUIET))
    assert "| other | 1.250 | 1.60 (1.25 to 2.00) | 1.00 GB | at most 1.0 % |" in printed
    assert printed.endswith("a note\n3 of 4 rounds undisturbed (others and steal at most 5 % of the cores)\n")
    assert kept["undisturbed_rounds"] == [0, 2, 3] and kept["rates"]["other"][1] == [0.1, 0.1]
    assert kept["loads"]["other"][1] == {"others": 0.2, "stolen": 0.0} and kept["medians"]["other"] == 1.25


def test_no_figure_without_an_undisturbed_round(tmp_path, capsys):
    printed, kept = reported(tmp_path, capsys, (1.0, BUSY), (1.0, BUSY))
    assert "|" not in printed and "0 of 2 rounds undisturbed" in printed and kept["medians"] == {}


def test_without_counters_the_report_says_so(tmp_path, capsys):
    printed, kept = reported(tmp_path, capsys, (1.0, None), (1.0, None), (1.0, None))
    assert "| 2.00 (2.00 to 2.00) | 1.00 GB | not known |" in printed
    assert "nothing is claimed: there is no /proc/stat" in printed and kept["loads"]["other"] == [None] * 3


def test_a_run_is_watched():
    step = 'print(\'{"units": 1, "seconds": 1}\')'
    run = program._run([sys.executable, "-c", "\n".join([step] * 3)], threads=1)
    assert (run.load is None) == (read_counters() is None)
    assert program._told(run, most_disturbed=-1.0).startswith("1.000; ")
    assert program._told(program.Measured([1.0], 0, [{}], BUSY), 0.05) == (
        "1.000; others 20.0 % of the cores, steal 0.0 % (disturbed, not quoted)"
    )
