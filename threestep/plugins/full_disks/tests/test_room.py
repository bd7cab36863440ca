"""The room that a run needs is that of what it writes, and is compared with what is free before it trains."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from threestep.plugins.full_disks import room
from threestep.plugins.full_disks.room import RoomNeeded, check_room, free_bytes, in_gigabytes, room_needed
from training.utils.base.errors import ThreestepError
from training.utils.checkpoints.arguments import CheckpointArguments
from training.utils.checkpoints.parts import CheckpointParts
from training.utils.engine.ranks.startup import Ranks

ALONE = Ranks(0, 0, 1, torch.device("cpu"))


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


def flags(**changes: Any) -> dict[str, Any]:
    return vars(CheckpointArguments(**changes))


def test_a_model_that_does_not_fit(tmp_path, free):
    free(5000)
    with pytest.raises(
        ThreestepError, match=r"--output_dir .* has 0.0 MB free, and this run needs 0.0 MB for its model;"
    ):
        check_room(tmp_path, flags(), parts(torch.float32), 0)
    free(7000)
    check_room(tmp_path, flags(), parts(torch.float32), 0)
    for asked, kept in (({"save_every": 1}, 0), ({"save_at_end": True}, 0), ({"save_epochs": 1.0}, 0), ({}, 1)):
        with pytest.raises(ThreestepError, match="for its model and 0.0 MB for a checkpoint; free space, or name"):
            check_room(tmp_path, flags(**asked), parts(torch.float32), kept)


def test_checkpoints_that_do_not_fit_all(tmp_path, free, capsys):
    free(6000 + 3 * 14000 - 1)
    check_room(tmp_path, flags(save_every=1), parts(torch.float32), 0)
    said = capsys.readouterr().out
    assert "each of 3 checkpoints (--keep_last 2, and the one being written)" in said and said.startswith("warning: ")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "there").write_bytes(b"a")  # of a resumed run: one less to write
    check_room(tmp_path, flags(save_every=1), parts(torch.float32), 0)
    assert capsys.readouterr().out == ""


def test_a_disk_that_tells_nothing(tmp_path, free):
    free(0, total=0)
    check_room(tmp_path, flags(save_every=1), parts(torch.float32), 0)


def test_what_is_free_below_a_folder_that_is_not_there(tmp_path):
    found = free_bytes(tmp_path / "a" / "b")
    assert found is not None and found > 0
    assert room.in_gigabytes(1_234_000_000) == "1.2 GB" and in_gigabytes(1_500_000) == "1.5 MB"
    assert isinstance(free_bytes(Path("relative")), int)
