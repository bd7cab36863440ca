"""A full disk: the room that a run needs, and where a trained model finds its place."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from threestep.plugins.full_disks import rescue
from threestep.plugins.full_disks.arguments import FullDiskArguments
from threestep.plugins.full_disks.rescue import new_rescue_folder, open_course
from threestep.plugins.full_disks.room import RoomNeeded, check_room, free_bytes, in_gigabytes, room_needed
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.checkpoints.arguments import CheckpointArguments
from training.utils.checkpoints.parts import CheckpointParts
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
    assert "retrying for 0 seconds (--wait_for_disk_seconds)" in said[0]
    assert said[1] == f"the disk accepts writes again: {tmp_path}/run/model was written"


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


def test_rescued(tmp_path, monkeypatch, capsys):
    final = made(tmp_path, wait_for_disk_seconds=0.0)
    final.write("model", saving(10**6, tmp_path / "run", []))
    (place,) = (tmp_path / "rescue").glob("threestep_*_run_*/model")
    assert (place / "weights").read_text() == "trained" and place.parent.stat().st_mode & 0o777 == 0o700
    said = capsys.readouterr().out
    assert f"THE MODEL IS NOT IN {tmp_path}/run" in said and f"it is in {place}; move it" in said
    with pytest.raises(ThreestepError, match=f"training is complete, .* then mv {place} {tmp_path}/run/model$"):
        final.check()
    (tmp_path / "temporary").mkdir()  # where temporary files are, if no folder is given
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
        ThreestepError, match="nor can --rescue_dir .*the weights of the last step are lost; free up space"
    ):
        final.write("model", saving(10**6, tmp_path, []))


def test_a_folder_to_rescue_to(tmp_path):
    found = [new_rescue_folder(str(tmp_path), Path("runs/sft")) for _ in range(2)]
    assert all(each.parent == tmp_path and each.name.startswith("threestep_runs_sft_") for each in found)
    assert found[0] != found[1] and found[0].stat().st_mode & 0o777 == 0o700
    mistakes = Mistakes()
    FullDiskArguments(rescue_dir=str(tmp_path / "none")).validate(mistakes)
    assert len(mistakes.sentences) == 1
    assert mistakes.sentences[0].startswith("--rescue_dir expects a writable folder, got ")


def check(place: Path, kept: int = 0, **asked: Any) -> None:
    check_room(place, vars(CheckpointArguments(**asked)), parts(torch.float32), kept)


def parts(dtype: torch.dtype, trained: int = 1000, frozen: int = 500, others: Any = ()) -> CheckpointParts:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(trained, dtype=dtype))
    module.below = torch.nn.Parameter(torch.zeros(frozen, dtype=dtype), requires_grad=False)
    engine: Any = SimpleNamespace(module=module)
    return CheckpointParts({"model": engine}, ALONE, others, {"model": None})  # type: ignore[dict-item]


def test_what_is_needed():
    assert room_needed(parts(torch.float32)) == RoomNeeded(models=6000, checkpoint=6000 + 8 * 1000)
    assert room_needed(parts(torch.bfloat16)) == RoomNeeded(models=3000, checkpoint=3000 + 12 * 1000)
    assert room_needed(parts(torch.bfloat16, others=[object()])).models == 6000


@pytest.fixture
def free(monkeypatch) -> Any:
    def set_free(size_bytes: int, total: int = 10**9) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size_bytes, total=total))

    return set_free


def test_a_model_that_does_not_fit(tmp_path, free):
    free(5000)
    with pytest.raises(
        ThreestepError, match="--output_dir .* has 0.0 MB free, but this run needs 0.0 MB for its model;"
    ):
        check(tmp_path)
    free(7000)
    check(tmp_path)
    for asked, kept in (({"save_every": 1}, 0), ({"save_at_end": True}, 0), ({"save_epochs": 1.0}, 0), ({}, 1)):
        with pytest.raises(ThreestepError, match="for its model and 0.0 MB for a checkpoint; free up space, or"):
            check(tmp_path, kept, **asked)
    free(0, total=0)  # a disk that tells nothing
    check(tmp_path, save_every=1)


def test_checkpoints_that_do_not_fit_all(tmp_path, free, capsys):
    free(6000 + 3 * 14000 - 1)
    check(tmp_path, save_every=1)
    said = capsys.readouterr().out
    assert "each of 3 checkpoints (--keep_last 2, and the one being written)" in said and said.startswith("warning: ")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "there").write_bytes(b"a")  # of a resumed run: one less to write
    check(tmp_path, save_every=1)
    assert capsys.readouterr().out == ""


def test_what_is_free_below_a_folder_that_is_not_there(tmp_path):
    found = free_bytes(tmp_path / "a" / "b")
    assert found is not None and found > 0
    assert in_gigabytes(1_234_000_000) == "1.2 GB" and in_gigabytes(1_500_000) == "1.5 MB"
    assert isinstance(free_bytes(Path("relative")), int)
