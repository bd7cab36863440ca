"""Runs whose disk refuses a write, by tests/refused_writes.py: a few calls; in the long form every call."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.refusing_disk import why_not

pytestmark = [
    pytest.mark.timeout(900),  # on a busy machine
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
# Before training; while it goes on: lines, a checkpoint's tokenizer; at the end: a model's tokenizer, the figures.
_AT = ["environment", "metrics.jsonl", r"models/model/tokenizer.json", r"/\.model\.\d+/tokenizer.json", "summary"]


@pytest.mark.parametrize(
    "flags, programs",
    [
        pytest.param(["--programs", "sft", "--at", *_AT], 1, id="short"),
        pytest.param(["--programs", "sft", "--at", "step_000001", "--log_on_disk"], 1, id="its log too"),
        pytest.param(["--programs", "acting_mtp", "--at", r"/mtp/"], 1, id="a head beside the model"),
        pytest.param(["--programs", "dpo", "--ranks", "2", "--at", r"/\.model\."], 1, id="two ranks"),
        pytest.param([], 6, marks=[pytest.mark.long, pytest.mark.timeout(20000)], id="all"),
        pytest.param(
            ["--ranks", "2", "--every", "7"],
            6,
            marks=[pytest.mark.long, pytest.mark.timeout(20000)],
            id="some, two ranks",
        ),
    ],
)
def test_a_run_that_was_trained_is_saved(flags: list[str], programs: int):
    words = [sys.executable, "-m", "tests.refused_writes", "--show", "2000", *flags]
    done = subprocess.run(words, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert done.returncode == 0 and len(lines) == programs, done.stdout + done.stderr[-2000:]
    assert all("saved" in line for line in lines) and not any("WRONG" in line for line in lines), lines
