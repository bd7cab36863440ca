"""The engine of a run, by the flag that names another source."""

from __future__ import annotations

import pytest

from tests.support.ppo_flags import ppo_flags
from threestep.plugins.replay.files import DumpingRollout, ReplayRollout
from training.step3_ppo.flags.rollout_choices import source_of
from training.utils.base.errors import ThreestepError
from training.utils.generation.decoding.hf import TransformersRollout


def test_engines_are_put_together(tmp_path):
    folder = str(tmp_path)
    for given, kind, draws in (
        ({}, TransformersRollout, True),
        ({"rollout_dump": folder}, DumpingRollout, True),
        ({"rollout_replay": folder}, ReplayRollout, False),
    ):
        source = source_of(ppo_flags(**given))
        assert (source.name, source.draws) == (next(iter(given), ""), draws)
        assert type(source.engine(TransformersRollout, rank=0, decides={})) is kind
    with pytest.raises(ThreestepError, match="one source, and --rollout_dump and --rollout_replay each name one"):
        source_of(ppo_flags(rollout_dump=folder, rollout_replay=folder))
