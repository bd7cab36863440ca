"""What keeps --reuse_forwards and --reuse_values auto from reuse, by the flags alone."""

from __future__ import annotations

import pytest

from tests.support.ppo_flags import ppo_flags
from training.step3_ppo.flags.checks import FORWARDS, VALUES, checked_components, why_apart

_PAIRS = {"num_samples_per_prompt": 2, "per_device_training_batch_size": 32}  # one step a rollout
_GRPO = {"advantage": "grpo", "kl_in": "loss", **_PAIRS}


def why(name: str, **given) -> str | None:
    paths = {"actor_model_name_or_path": "a", "critic_model_name_or_path": "c"}
    flags = ppo_flags(**{**paths, "reward": "model:1.0", **given})
    return why_apart(name, flags, checked_components(flags).algorithm)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        (FORWARDS, {}),
        (FORWARDS, {"advantage": "rloo", **_PAIRS}),
        (FORWARDS, {"critic_zero_stage": 3, "critic_dropout": 0.1}),
        (VALUES, {}),
        (VALUES, {"kl_coef": 0.0}),
        (VALUES, {"actor_zero_stage": 3, "critic_zero_stage": 3, "actor_dropout": 0.1}),
    ],
)
def test_a_forward_is_spared(name, given):
    assert why(name, **given) is None


@pytest.mark.parametrize("name", [FORWARDS, VALUES])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ppo_epochs": 2}, "a rollout has 2 optimizer steps"),
        ({"per_device_training_batch_size": 8}, "a rollout has 2 optimizer steps"),
        ({"generation_batches": 2, "per_device_training_batch_size": 32}, "a step learns from 2 rollouts"),
        ({"val_only": True}, "nothing is trained"),
    ],
)
def test_a_forward_of_its_own(name, given, said):
    assert (why(name, **given) or "").startswith(said)


@pytest.mark.parametrize("name", [FORWARDS, VALUES])
def test_a_plugin_that_needs_forwards_of_its_own(name, monkeypatch):
    monkeypatch.setattr("training.step3_ppo.flags.checks.own_forwards", lambda flags: ["steps are watched", "others"])
    assert why(name) == "steps are watched"


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        (
            FORWARDS,
            {"actor_dropout": 0.1},
            "true reads and learns in one forward, and --actor_dropout 0.1 would change",
        ),
        (FORWARDS, {"actor_zero_stage": 3}, "true keeps forwards whose weights ZeRO-3 has released"),
        (FORWARDS, {"kl_coef": 0.0}, "no forward is read that the step could learn from"),
        (FORWARDS, _GRPO, "no forward is read that the step could learn from"),
        (FORWARDS, {**_GRPO, "kl_coef": 0.0}, "no forward is read that the step could learn from"),
        (VALUES, {"critic_dropout": 0.1}, "true reads and learns in one forward, and --critic_dropout 0.1 would"),
        (VALUES, _GRPO, "there is no critic"),
    ],
)
def test_a_forward_of_one_role_alone(name, given, said):
    assert (why(name, **given) or "").startswith(said)


def test_returns_that_may_need_other_responses(tmp_path):
    """A user's estimator with a critic says nothing of whose values its returns read."""
    path = tmp_path / "own.py"
    path.write_text(
        "from training.step3_ppo.advantages import ESTIMATORS, Estimator\n"
        "mine = Estimator(ESTIMATORS['gae'].estimate, needs_critic=True)\n"
        "alone = Estimator(ESTIMATORS['gae'].estimate, needs_critic=True, returns_alone=True)\n"
    )
    said = why(VALUES, advantage=f"{path}:mine") or ""
    assert said.startswith("true learns a response's returns before others are read, and --advantage"), said
    assert why(VALUES, advantage=f"{path}:alone") is None and why(FORWARDS, advantage=f"{path}:mine") is None
