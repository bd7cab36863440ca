"""An earlier run in the folder is refused, or removed but for what the new one replaces."""

from __future__ import annotations

import pytest

from training.utils.base.errors import ThreestepError
from training.utils.checkpoints.folder import CheckpointFolder
from training.utils.checkpoints.other_runs import check_earlier_run, remove_earlier_run


@pytest.mark.parametrize("left", ["summary.json", "model/config.json", "model/adapter_config.json"])
def test_a_finished_run_is_refused(tmp_path, left):
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).write_text("{}")
    with pytest.raises(
        ThreestepError, match=rf"holds a finished run \({left}\): give another .*or --overwrite to replace"
    ):
        check_earlier_run(CheckpointFolder(tmp_path), resumes=False)


def test_checkpoints_are_refused(tmp_path):
    (tmp_path / "checkpoints" / "step_000003").mkdir(parents=True)
    with pytest.raises(ThreestepError, match="up to step 3: give --resume to continue it, .* --overwrite to replace"):
        check_earlier_run(CheckpointFolder(tmp_path), resumes=False)


def test_others_files_are_no_run(tmp_path):
    (tmp_path / "notes.txt").write_text("-")
    (tmp_path / "metrics.jsonl").write_text("")  # of a run that was killed
    check_earlier_run(CheckpointFolder(tmp_path), resumes=False)


def test_checkpoints_and_figures_are_removed_and_the_model_stays_until_the_end(tmp_path):
    (tmp_path / "checkpoints" / "step_000003").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    for name in ("summary.json", "reward_report.json", "model/config.json", "notes.txt"):
        (tmp_path / name).write_text("{}")
    remove_earlier_run(CheckpointFolder(tmp_path), figures_alone=True)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "model", "notes.txt"}
    remove_earlier_run(CheckpointFolder(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"model", "notes.txt"}
    remove_earlier_run(CheckpointFolder(tmp_path))


def test_a_finished_run_without_checkpoints_is_not_resumed(tmp_path):
    folder = CheckpointFolder(tmp_path)
    check_earlier_run(folder, resumes=True)
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(
        ThreestepError, match="--resume: .* and no checkpoint to resume from, which --save_at_end would .*--overwrite"
    ):
        check_earlier_run(folder, resumes=True)
    (tmp_path / "checkpoints" / "step_000003").mkdir(parents=True)
    check_earlier_run(folder, resumes=True)
