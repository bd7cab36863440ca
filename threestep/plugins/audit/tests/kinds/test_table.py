"""Every trainer's steps are of a kind that records know."""

from __future__ import annotations

import pytest

from threestep.plugins.audit.kinds.table import kind_of
from threestep.plugins.audit.recording.schema import OBJECTIVES
from training.step1_sft.trainer import SftStep
from training.step2_dpo.trainer import DpoStep
from training.step2_reward.trainer import RewardStep
from training.step3_ppo.learning.notes import PolicyStep

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("step", "function"),
    [(SftStep, "sft_record"), (RewardStep, "reward_record"), (DpoStep, "dpo_record"), (PolicyStep, "policy_record")],
)
def test_the_steps_of_every_trainer(step, function):
    kind = kind_of(step.kind)
    assert kind is not None and kind.record.__name__ == function and step.kind in OBJECTIVES


def test_a_kind_of_others():
    assert kind_of("hinge") is None
