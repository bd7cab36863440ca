"""The short form of tests/kill_and_resume.py, whose long form is run by hand (docs/lab_book.md)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.distributed.launch import ROOT
from tests.kill_and_resume import SHORT

pytestmark = pytest.mark.timeout(900)  # on a busy machine


def test_killed_and_resumed_is_as_never_stopped(tmp_path):
    command = [sys.executable, "-m", "tests.kill_and_resume", "--short", "--place", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800)
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines) == len(SHORT) and all("| identical |" in line for line in lines), lines
