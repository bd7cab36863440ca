"""What of --reuse_forwards and --reuse_values goes with a head."""

from __future__ import annotations

import pytest

from tests.support.ppo_flags import ppo_flags
from training.step3_ppo.flags.checks import FORWARDS, VALUES, checked_components, why_apart
from training.utils.base.errors import ThreestepError

PATHS = {"actor_model_name_or_path": "a", "critic_model_name_or_path": "c", "reward": "model:1.0"}


def test_the_critics_values_do_not_meet_the_head():
    sharded = {"actor_zero_stage": 3, "critic_zero_stage": 3, "actor_dropout": 0.1}
    flags = ppo_flags(**PATHS, **sharded, mtp_num_layers=1)
    assert why_apart(VALUES, flags, checked_components(flags).algorithm) is None


def test_forwards_that_keep_no_states_are_not_learned_from():
    flags = ppo_flags(**PATHS, mtp_num_layers=1)
    said = why_apart(FORWARDS, flags, checked_components(flags).algorithm) or ""
    assert said.startswith("true learns from forwards that keep no states")
    sentence = "--reuse_forwards .*keep no states, and --mtp_num_layers 1 reads them; leave one of the two"
    with pytest.raises(ThreestepError, match=sentence):
        checked_components(ppo_flags(**PATHS, reuse_forwards=True, mtp_num_layers=1))
