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
from training.utils.base.errors import ThreestepError
from training.utils.base.seeds import random_state_kept
from training.utils.checkpoints import parts as checkpoint_parts
from training.utils.checkpoints.arguments import CheckpointArguments
from training.utils.checkpoints.folder import CheckpointFolder, damage
from training.utils.checkpoints.loop import checkpointed_run
from training.utils.checkpoints.parts import CheckpointParts, collected_disk_errors
from training.utils.checkpoints.plan import CheckpointPlan, plan_checkpoints
from training.utils.engine.checkpoint_files import write_state
from training.utils.engine.ranks.startup import Ranks
from training.utils.run.run_folder import RunFolder

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


def opened(plan: CheckpointPlan, place: Path, engines: Any) -> Any:
    return checkpointed_run(plan, RunFolder(place, True), CheckpointParts(engines, RANKS), "rows")


def saved(place: Path, steps: int) -> None:
    flags = CheckpointArguments(keep_last=0)
    plan = plan_checkpoints(flags, str(place), "training.a", {"seed": 7}, ranks=RANKS)
    engine = SimpleNamespace(engine=Engine(900_000))
    with opened(plan, place, {"model": engine}) as (
        metrics,
        kept,
    ):
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
    plan = plan_checkpoints(CheckpointArguments(resume="latest"), str(tmp_path), "training.a", {"seed": 7}, ranks=RANKS)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "there")

    engine = SimpleNamespace(engine=Engine(10))
    with opened(plan, tmp_path, {"model": engine}) as (
        _,
        kept,
    ):
        monkeypatch.setattr(CheckpointFolder, refused, full)
        kept.save(2, {})
        monkeypatch.undo()
    assert "NO CHECKPOINT was written after step 2 (there: No space left on device)" in capsys.readouterr().out
    assert [path.name for path in folder.latest_first()] == ["step_000001"] and damage(folder.of(1)) is None
    assert not folder.partial(2).exists()


def test_a_run_that_was_asked_to_end_says_that_its_checkpoint_is_missing(tmp_path, monkeypatch, capsys):
    import signal

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "there")

    plan = plan_checkpoints(CheckpointArguments(), str(tmp_path), "training.a", {}, ranks=RANKS)
    monkeypatch.setattr(checkpoint_parts, "random_state", full)
    with (
        pytest.raises(SystemExit) as end,
        opened(plan, tmp_path, {}) as (_, kept),
    ):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert kept.due(1, total_steps=5)
        kept.save(1, {})
    assert end.value.code == 1
    said = capsys.readouterr().out
    assert "training continues, and there is no earlier checkpoint; free disk space" in said
    assert "stopped after step 1 (SIGUSR1, without its checkpoint); to resume: python -m training.a" in said


def test_other_failures_go_through():
    with pytest.raises(ValueError, match="mine"), collected_disk_errors([]):
        raise ValueError("mine")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda its: {**its, "dice": 6}, "holds dice, which this version does not know"),
        (lambda its: {name: its[name] for name in its if name != "numpy"}, "lacks numpy, which this version writes"),
        (lambda its: {**its, "torch": "zz"}, "is not what this version writes .ValueError"),
        (lambda its: {**its, "torch": "00"}, "is not what this version writes .RuntimeError"),
        (lambda its: {**its, "python": 3}, "is not what this version writes .TypeError"),
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
