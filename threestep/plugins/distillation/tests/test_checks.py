"""A teacher beside step 3's other flags, and alone."""

from __future__ import annotations

import pytest

from tests.support.ppo_flags import ppo_flags
from threestep.plugins.distillation.feature import teacher_of
from training.step3_ppo.flags.checks import checked_components
from training.utils.base.errors import ThreestepError

ALONE = {"actor_model_name_or_path": "a", "advantage": "none", "kl_coef": 0.0}


def test_a_teacher_alone_needs_no_reward():
    components = checked_components(ppo_flags(**ALONE, teacher_model_name_or_path="t"))
    assert components.rewards == () and not components.with_critic_tokenizer
    assert not components.algorithm.estimator.needs_critic and not components.algorithm.wants_reference


def test_a_teacher_beside_a_reward():
    flags = ppo_flags(
        actor_model_name_or_path="a", teacher_model_name_or_path="t", reward="gsm8k", advantage="reinforce++"
    )
    assert [reward.name for reward in checked_components(flags).rewards] == ["gsm8k"]
    settings = teacher_of(flags).settings
    assert settings.name_or_path == "t" and settings.longest_tokens == flags.longest_tokens


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (ALONE, "--advantage none leaves the actor to a teacher, and there is none; give --teacher_model_name_or_path"),
        ({**ALONE, "teacher_model_name_or_path": "t", "kl_coef": 0.1}, "--kl_coef 0.1 in the reward does nothing with"),
        (
            {**ALONE, "teacher_model_name_or_path": "t", "mask_truncated_responses": True},
            "--mask_truncated_responses leaves responses out of the loss, and a teacher is compared on every token",
        ),
        (
            {**ALONE, "teacher_model_name_or_path": "t", "parallel_thinking": True},
            "--parallel_thinking inserts tags that the teacher was not trained on; leave it or --teacher",
        ),
    ],
)
def test_what_does_not_go_together(given, why):
    with pytest.raises(ThreestepError, match=why):
        checked_components(ppo_flags(**given))
