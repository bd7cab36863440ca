"""Trials of tests/kill_and_resume.py: a few; in the long form all programs on 1 and 2 ranks, at ZeRO 0, 2 and 3."""

from __future__ import annotations

import pytest

from tests.kill_and_resume import SHORT
from tests.support.forked_programs import run_python
from tests.support.forked_runs import MODULES

pytestmark = pytest.mark.timeout(900)  # on a busy machine


@pytest.mark.parametrize(
    "flags, trials",
    [
        pytest.param(["--short"], len(SHORT), id="short"),
        pytest.param(
            ["--kills", "8", "--steps", "20"],
            6 * len(MODULES),
            marks=[pytest.mark.long, pytest.mark.timeout(10000)],
            id="all",
        ),
        pytest.param(
            "--programs ppo ahead free --ranks 1 --stages 0 --kills 10 --steps 40 --prompts 25 --rows 3336".split(),
            3,
            marks=[pytest.mark.long, pytest.mark.timeout(10000)],
            id="account of 1,000 prompts",
        ),
    ],
)
def test_killed_and_resumed_is_as_never_stopped(tmp_path, flags: list[str], trials: int):
    limit = 800 if trials == len(SHORT) else 9000
    done = run_python(["-m", "tests.kill_and_resume", *flags, "--place", str(tmp_path)], timeout_seconds=limit)
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines) == trials and all("| identical |" in line for line in lines), lines
