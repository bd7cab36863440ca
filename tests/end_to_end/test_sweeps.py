"""Sweeps that are programs of their own, in a short form; and in the long form at length.

tests/kill_and_resume.py: all programs on 1 and 2 ranks, at ZeRO 0, 2 and 3. tests/refused_writes.py: every call.
tests/auto_settings.py, tests/random_settings.py: what the second finds is shown by smaller tests.
tests/malformed_files.py: before every command that reads some, a sentence and code 2, or what is left of the file.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import malformed_files
from tests.kill_and_resume import SHORT
from tests.support.forked_programs import run_python
from tests.support.forked_runs import MODULES
from tests.support.refusing_disk import why_not

pytestmark = pytest.mark.timeout(1800)  # on a busy machine
LONG = [pytest.mark.long, pytest.mark.timeout(20000)]
# Before training; while it goes on: lines, a checkpoint's tokenizer; at the end: a model's tokenizer, the figures.
_AT = r"environment metrics.jsonl models/model/tokenizer.json /\.model\.\d+/tokenizer.json summary"
_ACCOUNT = "--programs ppo ahead free --ranks 1 --stages 0 --kills 10 --steps 40 --prompts 25 --rows 3336"


@pytest.mark.parametrize(
    ("program", "flags", "verdict", "count"),
    [
        pytest.param("kill_and_resume", "--short", "identical", len(SHORT), id="killed"),
        pytest.param(
            "kill_and_resume", "--kills 8 --steps 20", "identical", 6 * len(MODULES), marks=LONG, id="all killed"
        ),
        pytest.param("kill_and_resume", _ACCOUNT, "identical", 3, marks=LONG, id="account of 1,000 prompts"),
        pytest.param("auto_settings", "2 --count 2", "the same bits", 2, id="auto"),
        pytest.param("auto_settings", "2 --count 40", "the same bits", 40, marks=LONG, id="auto, 40 settings"),
        pytest.param("random_settings", "1", "agree", 64, marks=LONG, id="settings at random"),
    ],
)
def test_every_line_of_a_sweep_is_well(tmp_path: Path, program: str, flags: str, verdict: str, count: int):
    words = ["-m", f"tests.{program}", *flags.split(), "--place", str(tmp_path)]
    done = run_python(words, timeout_seconds=9000)
    lines = [line for line in done.stdout.splitlines() if line.startswith("|") and "| drawn anew |" not in line]
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines) == count and all(f"| {verdict} |" in line for line in lines), lines


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize(
    ("flags", "programs"),
    [
        pytest.param(f"--programs sft --at {_AT}", 1, id="short"),
        pytest.param("--programs sft --at step_000001 --log_on_disk", 1, id="its log too"),
        pytest.param("--programs acting_mtp --at /mtp/", 1, id="a head beside the model"),
        pytest.param(r"--programs dpo --ranks 2 --at /\.model\.", 1, id="two ranks"),
        pytest.param("", 6, marks=LONG, id="all"),
        pytest.param("--ranks 2 --every 7", 6, marks=LONG, id="some, two ranks"),
    ],
)
def test_a_run_that_was_trained_is_saved_on_a_disk_that_refuses(flags: str, programs: int):
    words = [sys.executable, "-m", "tests.refused_writes", "--show", "2000", *flags.split()]
    done = subprocess.run(words, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert done.returncode == 0 and len(lines) == programs, done.stdout + done.stderr[-2000:]
    assert all("saved" in line for line in lines) and not any("WRONG" in line for line in lines), lines


@pytest.mark.parametrize(
    ("kinds", "cases"), [(["sft"], 40), pytest.param([*malformed_files.STEPS], 1000, marks=LONG)], ids=["40", "1000"]
)
def test_malformed_files_end_no_command_with_a_traceback(tmp_path: Path, kinds: list[str], cases: int):
    malformed_files.make_runs(tmp_path, kinds)
    found = malformed_files.cases_of(tmp_path, malformed_files.commands_of(tmp_path, kinds), cases, seed=57)
    wrong = [f"{case.words}: {case.problem}\n{case.found.said[-1000:]}" for case in found if case.problem]
    assert not wrong, "\n".join(wrong)


def test_a_crash_and_a_silent_success_are_found(tmp_path: Path):
    """The judge of malformed files."""
    path = tmp_path / "rows.json"
    path.write_text('{"a": 1}')
    crashes = malformed_files.ReadingCommand("crashes", [path], lambda: {}["a"])
    silent = malformed_files.ReadingCommand("silent", [path], lambda: None)
    assert malformed_files.problem_of(crashes, malformed_files.outcome(crashes.call), False) == "crash"
    found = malformed_files.outcome(silent.call)
    assert malformed_files.problem_of(silent, found, True) == "ends as if nothing was wrong"
    assert malformed_files.problem_of(silent, found, False) == ""
