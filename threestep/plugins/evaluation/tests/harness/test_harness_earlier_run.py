"""The figures of an earlier run's harness go with that run."""

from __future__ import annotations

from training.utils.checkpoints.folder import CheckpointFolder
from training.utils.checkpoints.other_runs import remove_earlier_run


def test_figures_of_an_earlier_harness_are_removed(tmp_path):
    for name in ("harness.json", "notes.txt"):
        (tmp_path / name).write_text("{}")
    remove_earlier_run(CheckpointFolder(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt"}
