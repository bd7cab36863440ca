"""The short form of tests/kill_and_resume.py, whose long form is run by hand (docs/lab_book.md)."""

from __future__ import annotations

import pytest

from tests.kill_and_resume import SHORT
from tests.support.forked_programs import run_python

pytestmark = pytest.mark.timeout(900)  # on a busy machine


def test_killed_and_resumed_is_as_never_stopped(tmp_path):
    done = run_python(["-m", "tests.kill_and_resume", "--short", "--place", str(tmp_path)], timeout_seconds=800)
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines) == len(SHORT) and all("| identical |" in line for line in lines), lines
