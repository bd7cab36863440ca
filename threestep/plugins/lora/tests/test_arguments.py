"""The flags of LoRA, and what they change in models."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.ppo_flags import ppo_flags
from threestep.plugins.lora.arguments import LoraArguments, RolesLoraArguments
from threestep.plugins.lora.preparers import Lora, preparers
from training.step3_ppo.flags.checks import FORWARDS, VALUES, checked_components, why_apart
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.added import AddedFlags
from training.utils.flags.flags import note_mistakes

PATHS = {"actor_model_name_or_path": "a", "critic_model_name_or_path": "c"}


@dataclasses.dataclass(frozen=True)
class Given(AddedFlags):
    """Flags of a step."""

    own: LoraArguments | RolesLoraArguments


def mistakes_of(group) -> list[str]:
    mistakes = Mistakes()
    note_mistakes(group, mistakes)
    return mistakes.sentences


def lora(role: str = "", **given) -> list[Lora]:
    return list(preparers(Given((RolesLoraArguments if role else LoraArguments)(**given)), role))


@pytest.mark.parametrize(
    ("group", "given", "sentence"),
    [
        (LoraArguments, {"lora_dim": -1}, "--lora_dim expects 0 or more, got -1"),
        (LoraArguments, {"lora_dropout": 1.0}, "--lora_dropout expects 0 or more and less than 1, got 1.0"),
        (LoraArguments, {"lora_learning_rate": 0.0}, "--lora_learning_rate expects more than 0, got 0.0"),
        (RolesLoraArguments, {"critic_lora_dim": -2}, "--critic_lora_dim expects 0 or more, got -2"),
        (
            RolesLoraArguments,
            {"actor_lora_learning_rate": 0.0},
            "--actor_lora_learning_rate expects more than 0, got 0.0",
        ),
        (
            RolesLoraArguments,
            {"critic_lora_learning_rate": -1.0},
            "--critic_lora_learning_rate expects more than 0, got -1.0",
        ),
    ],
)
def test_mistakes(group, given, sentence):
    assert mistakes_of(group(**given)) == [sentence]


def test_without_a_rank_nothing_changes():
    assert lora(lora_dropout=0.1) == lora("actor", critic_lora_dim=4) == list(preparers(AddedFlags(), "")) == []


def test_rslora_scales_by_the_root_of_the_rank():
    [made] = lora(lora_dim=16, lora_alpha=8.0, use_rslora=True)
    assert made.lora_alpha / made.lora_dim == 8.0 / 4.0
    assert mistakes_of(LoraArguments(use_rslora=True)) and not mistakes_of(LoraArguments(use_rslora=True, lora_dim=4))


def test_dora_needs_adapters():
    assert lora(lora_dim=4, use_dora=True) == [Lora(4, use_dora=True)]
    assert not mistakes_of(LoraArguments(use_dora=True, lora_dim=4))
    said = str(mistakes_of(LoraArguments(use_dora=True)))
    assert "--use_dora adds magnitudes to LoRA's adapters, and there are none" in said


def test_every_setting_is_passed_on():
    given = {
        "lora_dim": 8, "lora_alpha": 3.0, "lora_dropout": 0.2, "lora_module_name": "x", "use_dora": True,
        "only_optimize_lora": False, "lora_learning_rate": 1e-3,
    }  # fmt: skip
    assert lora(**given) == [Lora(**given)] and {field.name for field in dataclasses.fields(Lora)} == given.keys()
    assert lora(lora_dim=2) == [Lora(2)]


def test_each_role_gets_its_own_settings():
    shared = {"lora_alpha": 9.0, "lora_dropout": 0.01, "only_optimize_lora": False}
    given = {
        **shared, "actor_lora_dim": 7, "critic_lora_dim": 8, "actor_lora_module_name": "x",
        "critic_lora_module_name": "y", "actor_lora_learning_rate": 1e-3, "critic_lora_learning_rate": 2e-3,
    }  # fmt: skip
    assert lora("actor", **given) == [Lora(7, lora_module_name="x", lora_learning_rate=1e-3, **shared)]
    assert lora("critic", **given) == [Lora(8, lora_module_name="y", lora_learning_rate=2e-3, **shared)]
    flags = ppo_flags(**PATHS, **given)
    assert [flags.model(role).preparers[0].lora_dim for role in ("actor", "critic")] == [7, 8]


@pytest.mark.parametrize("name", [FORWARDS, VALUES])
def test_dropout_before_adapters_keeps_forwards_apart(name):
    one_step = {"num_samples_per_prompt": 2, "per_device_training_batch_size": 32, "reward": "model:1.0"}
    flags = ppo_flags(**PATHS, **one_step, lora_dropout=0.1)
    said = "reads and learns in one forward, and --lora_dropout 0.1 would change"
    assert (why_apart(name, flags, checked_components(flags).algorithm) or "").startswith(f"true {said}")
    with pytest.raises(ThreestepError, match=f"--{name} {said} .*; give 0"):
        checked_components(ppo_flags(**PATHS, **one_step, lora_dropout=0.1, **{name: True}))


def test_a_shared_trunk_keeps_forwards_apart():
    given = {"num_samples_per_prompt": 2, "per_device_training_batch_size": 32, "reward": "model:1.0"}
    flags = ppo_flags(**PATHS, **given, share_trunk=True, actor_lora_dim=4, critic_lora_dim=2)
    said = why_apart(VALUES, flags, checked_components(flags).algorithm)
    assert said == "actor and critic share a trunk (--share_trunk)"
