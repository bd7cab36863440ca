"""A disk that is full while a checkpoint is written: the run goes on, and what was there before still loads. What
engines write and load is in tests/invariants/test_universal.py and tests/end_to_end/test_resume.py."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.small_disk import small_disk
from tests.unit.utils.checkpoints.test_loop import lacking, opened, plan, with_more
from training.utils.base.errors import ThreestepError
from training.utils.base.seeds import random_state_kept
from training.utils.checkpoints.folder import CheckpointFolder, damage
from training.utils.checkpoints.parts import CheckpointParts
from training.utils.engine.checkpoint_files import write_state
from training.utils.engine.ranks.startup import Ranks

RANKS = Ranks(0, 0, 1, torch.device("cpu"))


class Engine:
    """Writes as many bytes as it is told, as DeepSpeed does."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.checkpoint_engine = SimpleKeeper()
        self.engine = self

    def save_checkpoint(self, folder: str, tag: str, save_latest: bool) -> None:
        content = {"weights": torch.zeros(self.size_bytes, dtype=torch.uint8)}
        self.checkpoint_engine.save(content, os.path.join(folder, tag, "states.pt"))
        self.checkpoint_engine.commit(None)


class SimpleKeeper:
    def makedirs(self, path: str, exist_ok: bool = False) -> None: ...

    def save(self, content: object, path: str) -> None:
        write_state(content, path)

    def commit(self, info: object) -> bool:
        return True


def with_engine(size_bytes: int) -> dict[str, Any]:
    return {"model": SimpleNamespace(engine=Engine(size_bytes))}


def saved(place: Path, steps: int) -> None:
    with opened(plan(place, resume=None, keep_last=0), place, engines=with_engine(900_000)) as (metrics, kept):
        for step in range(1, steps + 1):
            metrics.write(step, {"a": step / 2})
            kept.save(step, {"before": step})


def test_on_a_small_disk(tmp_path, capsys):
    """A tmpfs of 3 MB holds three checkpoints of 0.9 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, 3 * 2**20):
        saved(disk / "run", steps=5)
        folder = CheckpointFolder(disk / "run")
        assert folder.steps() == [1, 2, 3] and [damage(folder.of(step)) for step in (1, 2, 3)] == [None] * 3
        assert sorted(path.name for path in folder.path.iterdir()) == [
            "latest", "step_000001", "step_000002", "step_000003",
        ]  # fmt: skip
        told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: NO CHECKPOINT")]
        assert len(told) == 2  # steps 4 and 5
        assert told[1].startswith("warning: NO CHECKPOINT was written after step 5 (")
        assert told[1].endswith(
            "; training continues, the next try is after step 7 at the latest, and the last good one is "
            f"{folder.of(3)}; free disk space, or lower --keep_last"
        )
        assert len((disk / "run" / "metrics.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize("refused", ["begin", "publish", "point_to"])
def test_whatever_is_refused_leaves_the_last_good_one(tmp_path, monkeypatch, capsys, refused):
    saved(tmp_path, steps=1)
    folder = CheckpointFolder(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "there")

    with opened(plan(tmp_path), tmp_path, engines=with_engine(10)) as (_, kept):
        monkeypatch.setattr(CheckpointFolder, refused, full)
        kept.save(2, {})
        monkeypatch.undo()
    assert "NO CHECKPOINT was written after step 2 (there: No space left on device)" in capsys.readouterr().out
    assert [path.name for path in folder.latest_first()] == ["step_000001"] and damage(folder.of(1)) is None
    assert not folder.partial(2).exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (with_more(dice=6), "holds dice, which this version does not know"),
        (lacking("numpy"), "lacks numpy, which this version writes"),
        (with_more(torch="zz"), "is not what this version writes .ValueError"),
        (with_more(torch="00"), "is not what this version writes .RuntimeError"),
        (with_more(python=3), "is not what this version writes .TypeError"),
    ],
)
def test_generators_of_another_form_are_named(tmp_path, changed, said):
    parts = CheckpointParts({}, RANKS)
    with random_state_kept():
        assert parts.write(tmp_path) is None
        parts.load(tmp_path)
        path = tmp_path / "random_0.json"
        path.write_text(json.dumps(changed(json.loads(path.read_text()))))
        with pytest.raises(ThreestepError, match=f"--resume: {path} {said}.*; resume with the version of Threestep"):
            parts.load(tmp_path)
