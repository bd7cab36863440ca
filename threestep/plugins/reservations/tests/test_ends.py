"""The end of a reservation: durations and moments, where it is told, what is refused, and what passes."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.utils.checkpoints.test_loop import opened, plan
from threestep.plugins.reservations import ends
from threestep.plugins.reservations.arguments import ReservationArguments, seconds_of
from threestep.plugins.reservations.ends import Deadline, check_end, end_of, moment_of, open_course, seconds_since_start
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.flags import note_mistakes

MAY_1 = 1777649400.0  # 2026-05-01 15:30 in London's winter time


@pytest.fixture
def in_tokyo(monkeypatch):
    """A machine whose time zone is not that of Z."""
    with monkeypatch.context() as changed:
        changed.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(
    ("text", "moment"),
    [("1777649400", MAY_1), ("1777649400.5", MAY_1 + 0.5), ("2026-05-01T15:30:00+00:00", MAY_1),
     ("2026-05-01T17:30:00+02:00", MAY_1), ("2026-05-01T15:30:00Z", MAY_1), ("1777649400000", None), ("5400", None),
     ("1h30m", None), ("", None), ("soon", None), ("-1777649400", None), ("nan", None)],
)  # fmt: skip
def test_moments(text, moment, in_tokyo):
    assert moment_of(text) == moment


def test_where_the_end_is_told(tmp_path):
    slurm, amazon = "SLURM_JOB_END_TIME", "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"
    environment = {slurm: "1777649400", amazon: "1777649999", "MINE": "2026-05-01T15:30:00Z\n"}
    assert end_of("auto", environment) == MAY_1
    assert end_of("auto", {amazon: "1777649999"}) == 1777649999.0
    assert end_of("MINE", environment) == MAY_1
    assert end_of("2026-05-01T15:30:00Z", {}) == MAY_1
    (tmp_path / "end").write_text("1777649400\n")
    assert end_of(str(tmp_path / "end"), {}) == MAY_1


@pytest.mark.parametrize(
    ("given", "environment", "sentence"),
    [
        ("auto", {}, r"--stop_at auto expects a scheduler to set SLURM_JOB_END_TIME, .* but none is set; pass a"),
        ("MINE", {}, "--stop_at reads the variable MINE, which is not set; set it, or leave --stop_at out"),
        ("MINE", {"MINE": "1h"}, "--stop_at expects seconds since 1970 or a time such as .* in the variable MINE, got"),
        ("here/no_file", {}, r"--stop_at reads the file here/no_file, which cannot be read \(No such file"),
        ("{}/end", {}, r"which cannot be read \(it is not text\)"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, given, environment, sentence):
    (tmp_path / "end").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ThreestepError, match=sentence):
        end_of(given.format(tmp_path), environment)
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    with pytest.raises(ThreestepError, match="--stop_at auto expects a scheduler to set SLURM_JOB_END_TIME"):
        check_end({"stop_at": "auto"})  # before the run
    check_end({"stop_at": None})


def test_an_end_that_is_moved_lost_or_over(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ends, "time", SimpleNamespace(time=lambda: MAY_1 - 100.0))
    file = tmp_path / "end"
    file.write_text(f"{MAY_1:.0f}")
    deadline = Deadline(str(file))
    assert deadline.seconds_left() == 100.0
    file.write_text(f"{MAY_1 + 60:.0f}")  # longer by a minute
    assert deadline.seconds_left() == 160.0
    file.unlink()
    assert [deadline.seconds_left() for _ in range(3)] == [160.0] * 3
    assert capsys.readouterr().out.count("which cannot be read") == 1  # one warning, not one a step
    file.write_text(f"{MAY_1 - 101:.0f}")
    assert [deadline.seconds_left() for _ in range(3)] == [None] * 3
    assert capsys.readouterr().out.count("the end time passed 1 seconds ago; the run continues without it") == 1


def run_in(place: Path, stop_before: str | None = None, stop_at: str | None = None) -> Any:
    """A run without engines that stops in time."""
    assert open_course({"stop_before": None, "stop_at": None}) is None
    course = open_course({"stop_before": stop_before, "stop_at": stop_at})
    return opened(plan(place), place, course=[course])


@pytest.mark.parametrize(
    ("flag", "steps", "stopped"),
    [
        ("stop_at", (10.0,) * 8, 80.0),  # 20 left and 1.5 x (10 + 10) wanted
        ("stop_before", (10.0,) * 8, 80.0),
        ("stop_at", (10.0, 30.0, 10.0), 40.0),  # the longest step counts: 60 left and 1.5 x (30 + 30) wanted
        ("stop_at", (101.0, 10.0, 10.0), None),  # it has passed, and asks for nothing more
    ],
)
def test_before_a_reservation_ends(tmp_path, monkeypatch, capsys, flag, steps, stopped):
    """It ends 100 seconds after the start; the run goes on from the checkpoint of the stop, in a longer one. A
    checkpoint takes as long as a step, for a guess."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(ends, "time", SimpleNamespace(monotonic=lambda: clock.now, time=lambda: 2e9 + clock.now))
    monkeypatch.setattr(ends, "seconds_since_start", lambda: clock.now)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(2e9 + 100.0))
    given = {"stop_at": "auto"} if flag == "stop_at" else {"stop_before": "100s"}
    with run_in(tmp_path, **given) as (_, kept):
        for number, seconds in enumerate(steps, start=1):
            clock.now += seconds
            if kept.due(number, total_steps=100):
                break
        else:
            clock.now = None
        assert clock.now == stopped
        if stopped is None:
            return
        with pytest.raises(SystemExit):
            kept.save(number, {})
    assert f"stopped after step {number} (--{flag} {given[flag]}); to resume: " in capsys.readouterr().out
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(2e9 + 10000.0))
    with run_in(tmp_path, stop_at="SLURM_JOB_END_TIME") as (_, kept):
        assert kept.restore()[0] == number
        assert not kept.due(number + 1, total_steps=100)


def test_a_clock_that_is_set_moves_no_deadline(monkeypatch):
    first, now = seconds_since_start(), time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600.0)
    assert 0 < first <= seconds_since_start() < first + 60.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("1.5", 1.5), ("45s", 45.0), ("90m", 5400.0), ("1h30m", 5400.0), ("2d1s", 172801.0), ("", None),
     ("1m1h", None), ("soon", None), ("-5", None)],
)  # fmt: skip
def test_durations(text, seconds):
    assert seconds_of(text) == seconds


def test_mistakes_are_told():
    mistakes = Mistakes()
    note_mistakes(ReservationArguments(stop_before="soon", stop_at=""), mistakes)
    assert mistakes.sentences == [
        "--stop_before expects a duration such as 5400, 90m or 1h30m, got 'soon'",
        "--stop_at expects auto, a variable, a file or a time, but it is empty",
    ]
