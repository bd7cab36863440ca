"""Which checkpoint and which part an export takes, and its sentences; its weights:
threestep/plugins/programs/tests/end_to_end/test_export_end_to_end.py."""

from __future__ import annotations

import pytest

from threestep.plugins.programs import export
from threestep.plugins.programs.export import engine_of, find_checkpoint, main
from training.utils.base.errors import ThreestepError
from training.utils.checkpoints.folder import CheckpointFolder


@pytest.fixture
def run(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.begin(step)
        (folder.partial(step) / "a.bin").write_bytes(b"weights")
        folder.publish(step, {})
    return tmp_path


def test_a_checkpoint_by_its_path_and_the_latest_of_a_run(run):
    checkpoints = run / "checkpoints"
    assert find_checkpoint(checkpoints / "step_000001") == checkpoints / "step_000001"
    assert find_checkpoint(run) == find_checkpoint(checkpoints) == checkpoints / "step_000002"


def test_a_damaged_one_is_never_exported(run, capsys):
    newest = run / "checkpoints" / "step_000002"
    (newest / "a.bin").write_bytes(b"Weights")
    assert find_checkpoint(run).name == "step_000001"
    assert "skipped step_000002" in capsys.readouterr().err
    with pytest.raises(ThreestepError, match="step_000002: a.bin does not have the content .*; give another"):
        main([str(newest), str(run / "out")])
    (run / "checkpoints" / "step_000001" / "a.bin").unlink()
    with pytest.raises(ThreestepError, match=r"only damaged checkpoints \(step_000002: a.bin does not have"):
        find_checkpoint(run)


def test_no_checkpoint_there(tmp_path):
    with pytest.raises(ThreestepError, match="step_000009: there is no such folder; give another"):
        find_checkpoint(tmp_path / "step_000009")
    with pytest.raises(ThreestepError, match="with no checkpoints in .*; --save_every writes them"):
        find_checkpoint(tmp_path)


def test_a_finished_run_without_checkpoints_gives_its_model(tmp_path, capsys):
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "model/config.json").write_text("{}")
    with pytest.raises(ThreestepError, match="with no checkpoints in"):
        export.main([str(run), str(tmp_path / "out")])  # it was killed before its end
    (run / "summary.json").write_text("{}")
    export.main([str(run), str(tmp_path / "out")])
    assert (tmp_path / "out/config.json").read_text() == "{}"
    with pytest.raises(ThreestepError, match="^OUT '.*' cannot be written: .*config.json: a file is in its way"):
        export.main([str(run), str(tmp_path / "out/config.json/model")])
    assert "has no checkpoints (--save_every, --save_at_end); its finished model is copied" in capsys.readouterr().out
    with pytest.raises(ThreestepError, match="with no checkpoints in"):
        export.main([str(run), str(tmp_path / "other"), "--part", "critic"])


def test_parts_are_engines(tmp_path):
    assert engine_of("model", ["model"], tmp_path) == engine_of("average", ["model"], tmp_path) == "model"
    assert [engine_of(part, ["actor", "critic"], tmp_path) for part in ("model", "critic")] == ["actor", "critic"]
    with pytest.raises(ThreestepError, match="--part critic expects a checkpoint with a critic, got model"):
        engine_of("critic", ["model"], tmp_path)


def test_one_of_an_earlier_version(run):
    with pytest.raises(ThreestepError, match="has no models/ with configuration and tokenizer: an earlier Threestep"):
        main([str(run), str(run / "out")])


def test_the_command_line():
    with pytest.raises(ThreestepError, match="the following arguments are required: OUT; see --help"):
        main(["a"])


@pytest.mark.parametrize("given", ["hf", "tfr"])
def test_an_engine_that_is_written_no_head(tmp_path, given):
    with pytest.raises(ThreestepError, match=f"^--mtp expects .*, got '{given}'$"):
        export.main([str(tmp_path), str(tmp_path / "out"), "--mtp", given])
