"""What becomes of steps whose loss or gradient is not finite. That they change nothing: tests/invariants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.engine.bad_steps import BadSteps
from training.utils.run.run_folder import BAD_STEPS, RunLog

BATCH = [7, 3]
NAN = float("nan")


def test_good_steps_say_nothing(tmp_path: Path, capsys):
    counter = BadSteps(1, RunLog(tmp_path / BAD_STEPS))
    counter.check(1, {"train/loss": 2.0, "train/skipped": 0.0, "train/accuracy": NAN}, BATCH)
    assert counter.count == 0 and not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


def test_bad_steps_are_told_with_their_rows_and_the_last_ends_the_run(tmp_path: Path, capsys):
    counter = BadSteps(2, RunLog(tmp_path / BAD_STEPS))
    counter.check(4, {"train/loss": NAN, "train/skipped": 1.0}, BATCH)
    assert capsys.readouterr().out == (
        "warning: step 4 was skipped, its loss or gradient is not finite (train/loss nan, train/skipped 1); the "
        f"row ids of its batch are in {tmp_path}/bad_steps.jsonl; 1 of --max_bad_steps 2\n"
    )
    counter.check(5, {"train/loss": 1.0, "train/skipped": 0.0}, BATCH)
    with pytest.raises(ThreestepError) as error:
        counter.check(6, {"train/loss": 1.0, "train/skipped": 1.0}, BATCH[:1])
    assert str(error.value) == (
        "2 optimizer steps had a loss or gradient that is not finite, the limit of --max_bad_steps 2, the last of them "
        f"step 6 (train/skipped 1); the row ids of its batch are in {tmp_path}/bad_steps.jsonl; they changed no "
        "weight: look at those rows, lower the learning rate, or train with --dtype fp32"
    )
    lines = [json.loads(line) for line in (tmp_path / "bad_steps.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 4, "figures": {"train/loss": "nan", "train/skipped": "1.0"}, "row_ids": [7, 3]},
        {"step": 6, "figures": {"train/skipped": "1.0"}, "row_ids": [7]},
    ]


def test_other_ranks_and_loops_by_themselves_write_nothing(tmp_path: Path, capsys):
    BadSteps(5, RunLog(tmp_path / BAD_STEPS), is_main_rank=False).check(1, {"train/loss": NAN}, BATCH)
    BadSteps(5).check(1, {"train/loss": NAN}, BATCH)
    assert not list(tmp_path.iterdir()) and "bad_steps.jsonl" not in capsys.readouterr().out


def test_the_search_for_a_loss_scale_is_no_bad_step(capsys):
    counter = BadSteps(1, dtype="fp16")
    counter.check(1, {"train/loss": 1.0, "train/skipped": 1.0}, BATCH)
    assert counter.count == 0 and capsys.readouterr().out == ""
    with pytest.raises(ThreestepError, match="1 optimizer step had a loss"):
        counter.check(2, {"critic/value_loss": float("inf"), "critic/skipped": 1.0}, BATCH)
