"""The ways of decoding in which experts are recorded."""

from __future__ import annotations

import pytest

from threestep.plugins.routers.expert_log import recording_way
from training.utils.base.errors import ThreestepError
from training.utils.generation.decoding.decoding import FIXED, MASKED, WAYS


def test_ways_that_do_not_record():
    assert recording_way(FIXED, "Model") is MASKED and recording_way(WAYS[1], "Model") is WAYS[1]
    with pytest.raises(ThreestepError, match="--replay_routers needs prompts of different lengths in one batch"):
        recording_way(WAYS[2], "Model")
