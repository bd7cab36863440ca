"""The flags of step 3, checked before anything loads."""

from __future__ import annotations

import dataclasses

import pytest

from training.step3_ppo.flags.arguments import PpoArguments
from training.step3_ppo.flags.roles_arguments import RolesArguments
from training.utils.base.errors import Mistakes
from training.utils.engine.config.arguments import EngineSettings
from training.utils.flags.flags import note_mistakes
from training.utils.models.settings import ModelSettings


def mistakes_of(arguments) -> list[str]:
    mistakes = Mistakes()
    note_mistakes(arguments, mistakes)
    return mistakes.sentences


def roles(**given) -> RolesArguments:
    return RolesArguments(**{"actor_model_name_or_path": "a", "critic_model_name_or_path": "c", **given})


def test_the_defaults_are_sound():
    assert mistakes_of(PpoArguments()) == [] and mistakes_of(roles()) == []


@pytest.mark.parametrize(
    "given",
    [
        {"per_device_generation_batch_size": 16, "per_device_training_batch_size": 6},
        {"per_device_generation_batch_size": 16, "per_device_training_batch_size": 24},
        {"per_device_generation_batch_size": 32, "gradient_accumulation_steps": 3},
        {"per_device_generation_batch_size": 5, "generation_batches": 3, "per_device_training_batch_size": 10},
        {"per_device_generation_batch_size": 5, "num_samples_per_prompt": 3, "per_device_training_batch_size": 10},
    ],
)
def test_a_batch_that_does_not_divide(given):
    (sentence,) = mistakes_of(PpoArguments(**given))
    assert "which does not divide into minibatches of" in sentence
    assert "make the first a multiple of the second" in sentence


def test_a_minibatch_of_several_rollouts_draws_so_many():
    """DeepSpeed-Chat's own single-GPU line: rollouts of 8, two of them accumulated."""
    eight = {"per_device_generation_batch_size": 8, "per_device_training_batch_size": 8}
    ppo = PpoArguments(**eight, gradient_accumulation_steps=2)
    assert mistakes_of(ppo) == [] and ppo.generation_batches == 2 and ppo.sequences_per_rollout == 16
    assert PpoArguments(**eight, num_samples_per_prompt=2, gradient_accumulation_steps=2).generation_batches == 1
    assert dataclasses.replace(ppo).generation_batches == 2


def test_batches_that_divide():
    for given in (
        {"per_device_generation_batch_size": 6, "generation_batches": 5, "per_device_training_batch_size": 10},
        {"per_device_generation_batch_size": 32, "gradient_accumulation_steps": 2},
        {"per_device_generation_batch_size": 8, "num_samples_per_prompt": 4, "gradient_accumulation_steps": 2},
    ):
        assert mistakes_of(PpoArguments(**given)) == []


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"num_samples_per_prompt": 0}, "--num_samples_per_prompt expects 1 or more, got 0"),
        ({"ppo_epochs": 0}, "--ppo_epochs expects 1 or more, got 0"),
        ({"max_answer_seq_len": 0}, "--max_answer_seq_len expects 1 or more, got 0"),
        ({"max_train_steps": 0}, "--max_train_steps expects 1 or more, got 0"),
        ({"num_train_epochs": 0.0}, "--num_train_epochs expects more than 0, got 0.0"),
        ({"temperature": 0.0}, "--temperature expects more than 0, got 0.0"),
        ({"top_k": -1}, "--top_k expects 0 or more, got -1"),
        ({"top_p": 0.0}, "--top_p expects more than 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "--top_p expects more than 0 and at most 1, got 1.1"),
        ({"min_p": 1.5}, "--min_p expects a number from 0 to 1, got 1.5"),
        ({"stop": ["x", ""]}, "--stop expects texts of a character or more, got ''"),
        ({"bad_words": [""]}, "--bad_words expects texts of a character or more, got ''"),
        (
            {"reuse_forwards": True, "ppo_epochs": 2, "per_device_training_batch_size": 8},
            "--reuse_forwards learns once from each rollout's forwards, and --ppo_epochs, --generation_batches and "
            "--per_device_training_batch_size make 4 optimizer steps of 1 rollouts; make it one of one, or leave "
            "it out",
        ),
        (
            {"reuse_values": True, "ppo_epochs": 2, "per_device_training_batch_size": 8},
            "--reuse_values learns once from each rollout's forwards, and --ppo_epochs, --generation_batches and "
            "--per_device_training_batch_size make 4 optimizer steps of 1 rollouts; make it one of one, or leave "
            "it out",
        ),
        ({"clip_reward": -5.0}, "--clip_reward expects more than 0, got -5.0"),
        ({"eval_interval": -1}, "--eval_interval expects 0 or more, got -1"),
    ],
)
def test_mistakes(given, sentence):
    assert mistakes_of(PpoArguments(**given)) == [sentence]


def test_a_batch_size_of_zero_is_told_and_divides_nothing():
    assert len(mistakes_of(PpoArguments(per_device_training_batch_size=0))) == 2


def test_sequences_of_a_rank():
    ppo = PpoArguments(
        per_device_generation_batch_size=6, num_samples_per_prompt=4, generation_batches=2,
        per_device_training_batch_size=8, gradient_accumulation_steps=3,
    )  # fmt: skip
    assert (ppo.sequences_per_rollout, ppo.sequences_per_minibatch) == (48, 24)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"actor_model_name_or_path": ""},
            "--actor_model_name_or_path expects a model folder or hub name, got nothing",
        ),
        ({"critic_learning_rate": 0.0}, "--critic_learning_rate expects more than 0, got 0.0"),
        ({"actor_zero_stage": 5}, "--actor_zero_stage expects a number from 0 to 3, got 5"),
        ({"dtype": "fp8"}, "--dtype expects one of fp32, bf16, fp16, got 'fp8'; did you mean 'fp32' or 'fp16'?"),
        ({"actor_dropout": 1.0}, "--actor_dropout expects 0 or more and less than 1, got 1.0"),
    ],
)
def test_mistakes_of_roles(given, sentence):
    assert mistakes_of(roles(**given)) == [sentence]


def test_offload_needs_something_to_offload():
    assert len(mistakes_of(roles(offload=True))) == 2  # both are at stage 0
    assert mistakes_of(roles(offload=True, actor_zero_stage=2, critic_zero_stage=3)) == []


def test_each_role_gets_its_own_settings():
    given = roles(
        actor_learning_rate=0.1, critic_learning_rate=0.2, actor_weight_decay=0.3, critic_weight_decay=0.4,
        actor_zero_stage=1, critic_zero_stage=2, actor_gradient_checkpointing=True, actor_dropout=0.5,
        critic_dropout=0.6, dtype="fp32",
        offload=True, lr_scheduler_type="linear", num_warmup_steps=11, max_grad_norm=12.0,
    )  # fmt: skip
    assert given.model("actor") == ModelSettings("a", dropout=0.5, gradient_checkpointing=True, takes_media=True)
    assert given.model("critic") == ModelSettings("c", dropout=0.6, takes_media=True)
    engine = EngineSettings(
        dtype="fp32", offload=True, lr_scheduler_type="linear", num_warmup_steps=11, max_grad_norm=12.0
    )
    assert given.engine("actor") == dataclasses.replace(engine, zero_stage=1, learning_rate=0.1, weight_decay=0.3)
    assert given.engine("critic") == dataclasses.replace(engine, zero_stage=2, learning_rate=0.2, weight_decay=0.4)
