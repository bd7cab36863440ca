"""Flags of rollouts in a folder."""

from __future__ import annotations

from threestep.plugins.replay.arguments import RecordedArguments
from training.utils.base.errors import Mistakes
from training.utils.flags.flags import note_mistakes


def mistakes_of(**given) -> list[str]:
    mistakes = Mistakes()
    note_mistakes(RecordedArguments(**given), mistakes)
    return mistakes.sentences


def test_a_folder_of_rollouts_is_read_or_written(tmp_path):
    assert mistakes_of(rollout_dump=str(tmp_path / "new")) == []
    (tmp_path / "rollout_000000_rank0.safetensors").touch()
    folder = str(tmp_path)
    assert mistakes_of(rollout_replay=folder) == []
    assert mistakes_of(rollout_dump=str(tmp_path / "new"), rollout_replay=folder) == [
        "--rollout_dump and --rollout_replay exclude each other: a replay draws nothing new"
    ]
    assert mistakes_of(rollout_replay="/no/such/folder") == [
        "--rollout_replay expects a folder that --rollout_dump filled, and /no/such/folder has no rollouts; name "
        "another"
    ]
