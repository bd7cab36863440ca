"""Which checkpoint and which part an export takes, and its sentences; its weights: tests/end_to_end/test_export.py."""

from __future__ import annotations

import pytest

from training.export import chosen_checkpoint, engine_of, main
from training.utils.run.checkpoints import CheckpointFolder
from training.utils.run.errors import ThreestepError


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
    assert chosen_checkpoint(checkpoints / "step_000001") == checkpoints / "step_000001"
    assert chosen_checkpoint(run) == chosen_checkpoint(checkpoints) == checkpoints / "step_000002"


def test_a_damaged_one_is_never_exported(run, capsys):
    newest = run / "checkpoints" / "step_000002"
    (newest / "a.bin").write_bytes(b"Weights")
    assert chosen_checkpoint(run).name == "step_000001"
    assert "passed over" in capsys.readouterr().err
    with pytest.raises(ThreestepError, match="step_000002: a.bin has another content than was written; give another"):
        main([str(newest), str(run / "out")])
    (run / "checkpoints" / "step_000001" / "a.bin").unlink()
    with pytest.raises(ThreestepError, match=r"none is whole \(step_000002: a.bin has another"):
        chosen_checkpoint(run)


def test_no_checkpoint_there(tmp_path):
    with pytest.raises(ThreestepError, match="step_000009: there is no such folder; give another"):
        chosen_checkpoint(tmp_path / "step_000009")
    with pytest.raises(ThreestepError, match="there is none; --save_every writes them"):
        chosen_checkpoint(tmp_path)


def test_parts_are_engines(tmp_path):
    assert engine_of("model", ["model"], tmp_path) == engine_of("average", ["model"], tmp_path) == "model"
    assert [engine_of(part, ["actor", "critic"], tmp_path) for part in ("model", "critic")] == ["actor", "critic"]
    with pytest.raises(ThreestepError, match="--part critic: .* holds model, and no critic"):
        engine_of("critic", ["model"], tmp_path)


def test_one_of_an_earlier_version(run):
    with pytest.raises(ThreestepError, match="holds no models/ with configuration and tokenizer: an earlier Threestep"):
        main([str(run), str(run / "out")])


def test_the_command_line():
    with pytest.raises(ThreestepError, match="the following arguments are required: OUT; --help says"):
        main(["a"])
