"""A trained model finds its place: at once, later, in the rescue folder; or a sentence says that none took it."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from threestep.plugins.full_disks import rescue
from threestep.plugins.full_disks.arguments import FullDiskArguments
from threestep.plugins.full_disks.rescue import new_rescue_folder, open_course
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.engine.ranks.startup import Ranks
from training.utils.setup.saving import FinalModels

ALONE = Ranks(0, 0, 1, torch.device("cpu"))


def refused(path: Path) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def saving(refusals: int, below: Path, times: list[float]) -> Callable[[Path], None]:
    """Saves a model, after `refusals` refusals `below` a folder."""

    def save(place: Path) -> None:
        times.append(time.monotonic())
        if place.is_relative_to(below) and len(times) <= refusals:
            raise refused(place)
        place.mkdir()
        (place / "weights").write_text("trained")

    return save


def made(tmp_path: Path, **flags: object) -> FinalModels:
    for name in ("run", "rescue"):
        (tmp_path / name).mkdir(exist_ok=True)
    flags = {"rescue_dir": str(tmp_path / "rescue"), **flags}
    return FinalModels(tmp_path / "run", [open_course(vars(FullDiskArguments(**flags)))], ALONE)  # type: ignore[arg-type]


def test_at_once(tmp_path, capsys):
    final, times = made(tmp_path), []
    final.write("model", saving(0, tmp_path, times))
    final.check()
    assert (tmp_path / "run" / "model" / "weights").exists() and len(times) == 1
    assert capsys.readouterr().out == ""


def test_an_error_of_the_moment(tmp_path, capsys):
    final, times = made(tmp_path, wait_for_disk_seconds=0.0), []
    final.write("model", saving(1, tmp_path, times))
    final.check()
    assert len(times) == 2
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(
        f"warning: {tmp_path}/run/model cannot be written ({tmp_path}/run/model: No space left on"
    )
    assert "trying again for 0 seconds (--wait_for_disk_seconds)" in said[0]
    assert said[1] == f"the disk takes it now: {tmp_path}/run/model is written"


def test_waits_for_room(tmp_path, monkeypatch):
    monkeypatch.setattr(rescue, "_FIRST_PAUSE_SECONDS", 0.01)
    final, times = made(tmp_path, wait_for_disk_seconds=30.0), []
    final.write("model", saving(4, tmp_path, times))
    final.check()
    pauses = [later - earlier for earlier, later in zip(times[1:], times[2:], strict=False)]
    assert len(times) == 5 and pauses == sorted(pauses) and pauses[0] >= 0.01


def test_the_time_is_for_all_models_together(tmp_path, monkeypatch):
    monkeypatch.setattr(rescue, "_FIRST_PAUSE_SECONDS", 0.1)
    final = made(tmp_path, wait_for_disk_seconds=0.3)
    started = time.monotonic()
    for name in ("model", "critic", "model_ema"):
        final.write(name, saving(10**6, tmp_path / "run", []))
    assert time.monotonic() - started < 0.9 and len(final.elsewhere) == 3
    assert len({place.parent for place in final.elsewhere.values()}) == 1


def test_rescued(tmp_path, capsys):
    final = made(tmp_path, wait_for_disk_seconds=0.0)
    final.write("model", saving(10**6, tmp_path / "run", []))
    (place,) = (tmp_path / "rescue").glob("threestep_*_run_*/model")
    assert (place / "weights").read_text() == "trained" and place.parent.stat().st_mode & 0o777 == 0o700
    said = capsys.readouterr().out
    assert f"THE MODEL IS NOT IN {tmp_path}/run" in said and f"it is in {place}; move it" in said
    with pytest.raises(ThreestepError, match=f"the run is trained, .* then mv {place} {tmp_path}/run/model$"):
        final.check()


def test_rescued_where_temporary_files_are(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    final = made(tmp_path, wait_for_disk_seconds=0.0, rescue_dir=None)
    final.write("model", saving(10**6, tmp_path / "run", []))
    assert list((tmp_path / "temporary").glob("threestep_*/model/weights"))


def test_a_signal_ends_the_wait(tmp_path, capfd):
    final = made(tmp_path, wait_for_disk_seconds=60.0)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    started = time.monotonic()
    final.write("model", saving(10**6, tmp_path / "run", []))
    assert time.monotonic() - started < 10 and "model" in final.elsewhere
    assert "SIGTERM: no longer waiting for the disk" in capfd.readouterr().err


def test_nowhere(tmp_path):
    final = made(tmp_path, wait_for_disk_seconds=0.0)
    with pytest.raises(
        ThreestepError, match="nor can --rescue_dir .*the weights of the last step are lost; free space"
    ):
        final.write("model", saving(10**6, tmp_path, []))


def test_a_folder_to_rescue_to(tmp_path):
    made = new_rescue_folder(str(tmp_path), Path("runs/sft"))
    assert made.parent == tmp_path and made.name.startswith("threestep_runs_sft_")
    assert made.stat().st_mode & 0o777 == 0o700 and new_rescue_folder(str(tmp_path), Path("runs/sft")) != made


def test_a_place_that_cannot_be_written_to(tmp_path):
    mistakes = Mistakes()
    FullDiskArguments(rescue_dir=str(tmp_path / "none")).validate(mistakes)
    with pytest.raises(ThreestepError, match="^--rescue_dir expects a folder that can be written to, got .*/none"):
        mistakes.raise_if_any()
