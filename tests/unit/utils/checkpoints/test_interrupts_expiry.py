"""The end of a reservation: where it is told, what is refused, and what passes."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.checkpoints import interrupts
from training.utils.checkpoints.interrupts import Deadline, Expiry, expiry_of, moment_of

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
    assert expiry_of("auto", environment) == Expiry(variable=slurm)
    assert expiry_of("auto", {amazon: "1777649999"}).read({amazon: "1777649999"}) == 1777649999.0
    assert expiry_of("MINE", environment).read(environment) == MAY_1
    assert expiry_of("2026-05-01T15:30:00Z").read({}) == MAY_1
    (tmp_path / "end").write_text("1777649400\n")
    assert expiry_of(str(tmp_path / "end")).read({}) == MAY_1


@pytest.mark.parametrize(
    ("given", "environment", "sentence"),
    [
        ("auto", {}, r"--stop_at auto expects a scheduler's SLURM_JOB_END_TIME, .* got none of them; give the"),
        ("MINE", {}, "--stop_at reads the variable MINE, which is not set; set it, or leave --stop_at out"),
        ("MINE", {"MINE": "1h"}, "--stop_at expects seconds since 1970 or a time such as .* in the variable MINE, got"),
        ("here/no_file", {}, r"--stop_at reads the file here/no_file, which cannot be read \(No such file"),
    ],
)
def test_mistakes(given, environment, sentence):
    with pytest.raises(ThreestepError, match=sentence):
        expiry_of(given, environment).read(environment)


def test_bytes_that_are_no_text(tmp_path):
    (tmp_path / "end").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ThreestepError, match=r"which cannot be read \(it is no text\)"):
        expiry_of(str(tmp_path / "end")).read()


def test_an_end_that_is_moved_lost_or_over(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(interrupts, "time", SimpleNamespace(time=lambda: MAY_1 - 100.0))
    file = tmp_path / "end"
    file.write_text(f"{MAY_1:.0f}")
    deadline = Deadline(expiry_of(str(file)))
    assert deadline.seconds_left() == 100.0
    file.write_text(f"{MAY_1 + 60:.0f}")  # longer by a minute
    assert deadline.seconds_left() == 160.0
    file.unlink()
    assert [deadline.seconds_left() for _ in range(3)] == [160.0] * 3
    assert capsys.readouterr().out.count("which cannot be read") == 1  # one warning, not one a step
    file.write_text(f"{MAY_1 - 101:.0f}")
    assert [deadline.seconds_left() for _ in range(3)] == [None] * 3
    assert capsys.readouterr().out.count("the end has passed 1 seconds ago, and the run goes on without it") == 1
