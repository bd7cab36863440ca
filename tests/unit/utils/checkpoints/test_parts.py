"""A disk that is full while a checkpoint is written: the run goes on, and what was there before still loads. What
engines write and load is in tests/invariants/test_universal.py and tests/end_to_end/test_resume.py."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch

from tests.unit.utils.checkpoints.test_loop import lacking, opened, plan, saved, with_more
from training.utils.base.errors import ThreestepError
from training.utils.base.seeds import random_state_kept
from training.utils.checkpoints.folder import CheckpointFolder, damage
from training.utils.checkpoints.parts import CheckpointParts
from training.utils.engine.ranks.startup import Ranks

RANKS = Ranks(0, 0, 1, torch.device("cpu"))


@pytest.mark.parametrize("refused", ["begin", "publish", "point_to"])
def test_whatever_is_refused_leaves_the_last_good_one(tmp_path, monkeypatch, capsys, refused):
    saved(tmp_path, (1,))
    folder = CheckpointFolder(tmp_path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "there")

    with opened(plan(tmp_path), tmp_path) as (_, kept):
        monkeypatch.setattr(CheckpointFolder, refused, full)
        kept.save(2, {})
        monkeypatch.undo()
    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: NO CHECKPOINT")]
    assert told.startswith("warning: NO CHECKPOINT was written after step 2 (there: No space left on device); training")
    assert told.endswith(
        "the next try is after step 3 at the latest, and the last good one is "
        f"{folder.of(1)}; free disk space, or lower --keep_last"
    )
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
