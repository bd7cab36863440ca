"""What keeps --reuse_forwards auto from reuse, by the flags alone."""

from __future__ import annotations

import pytest

from tests.support.ppo_flags import ppo_flags
from training.step3_ppo.flags.checks import checked_components
from training.step3_ppo.flags.reuse import why_apart

_PAIRS = {"num_samples_per_prompt": 2, "per_device_training_batch_size": 32}  # one step a rollout
_GRPO = {"advantage": "grpo", "kl_in": "loss", **_PAIRS}


def why(**given) -> str | None:
    paths = {"actor_model_name_or_path": "a", "critic_model_name_or_path": "c"}
    flags = ppo_flags(**{**paths, "reward": "model:1.0", **given})
    return why_apart(flags, checked_components(flags).algorithm)


@pytest.mark.parametrize("given", [{}, {"kl_coef": 0.0}, {"advantage": "rloo", **_PAIRS}])
def test_a_forward_is_spared(given):
    assert why(**given) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ppo_epochs": 2}, "a rollout has 2 optimizer steps"),
        ({"per_device_training_batch_size": 8}, "a rollout has 2 optimizer steps"),
        ({"generation_batches": 2, "per_device_training_batch_size": 32}, "a step learns from 2 rollouts"),
        ({"val_only": True}, "nothing is trained"),
        ({"sequence_parallel_size": 2}, "ranks share rows"),
        ({"actor_dropout": 0.1}, "true reads and learns in one forward, and --actor_dropout 0.1 would change"),
        ({"critic_zero_stage": 3}, "true keeps forwards whose weights ZeRO-3 has released, and --critic_zero_stage"),
        ({"mtp_num_layers": 1}, "true learns from forwards that keep no states"),
        ({"record_steps": [1]}, "steps are recorded"),
        ({"parallel_thinking": True}, "responses have paths side by side"),
        (_GRPO, "no forward is read that the step could learn from"),
        ({**_GRPO, "kl_coef": 0.0}, "no forward is read that the step could learn from"),
    ],
)
def test_a_forward_of_its_own(given, said):
    assert (why(**given) or "").startswith(said)
