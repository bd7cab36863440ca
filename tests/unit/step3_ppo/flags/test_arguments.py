"""The flags of step 3 and of the algorithm, checked before anything loads."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from training.step3_ppo import STEP
from training.step3_ppo.flags.arguments import AlgorithmArguments, PpoArguments
from training.step3_ppo.flags.roles_arguments import RolesArguments
from training.utils.base.errors import Mistakes
from training.utils.engine.config.arguments import EngineSettings
from training.utils.flags.arguments import parse_arguments, resolved_settings
from training.utils.flags.flags import note_mistakes
from training.utils.models.settings import ModelSettings


def mistakes_of(arguments: Any) -> list[str]:
    mistakes = Mistakes()
    note_mistakes(arguments, mistakes)
    return mistakes.sentences


def roles(**given: Any) -> RolesArguments:
    return RolesArguments(**{"actor_model_name_or_path": "a", "critic_model_name_or_path": "c", **given})


@pytest.mark.parametrize("of", [PpoArguments, AlgorithmArguments, roles])
def test_the_defaults_are_sound(of):
    assert mistakes_of(of()) == []


def batches(generation: int, training: int | None = None, **more: int) -> dict[str, int]:
    given = {"per_device_generation_batch_size": generation, **more}
    return given if training is None else {**given, "per_device_training_batch_size": training}


@pytest.mark.parametrize(
    ("given", "divides"),
    [
        (batches(16, 6), False),
        (batches(16, 24), False),
        (batches(32, gradient_accumulation_steps=3), False),
        (batches(5, 10, generation_batches=3), False),
        (batches(5, 10, num_samples_per_prompt=3), False),
        (batches(6, 10, generation_batches=5), True),
        (batches(32, gradient_accumulation_steps=2), True),
        (batches(8, num_samples_per_prompt=4, gradient_accumulation_steps=2), True),
    ],
)
def test_whether_a_batch_divides(given, divides):
    said = mistakes_of(PpoArguments(**given))
    assert len(said) == (not divides)
    assert (
        divides or "cannot be divided into minibatches of" in said[0] and "make the first number a multiple" in said[0]
    )


@pytest.mark.parametrize(
    ("words", "samples"),
    [
        ([], 1),
        (["--advantage", "rloo"], 8),
        (["--advantage", "grpo", "--num-samples-per-prompt=4"], 4),
        (["--advantage", "grpo", "--config={}/run.yaml"], 2),
        (["--advantage", "missing.py:mine"], 1),
        (["--advantage", "{}/own.py:plain"], 8),
        (["--advantage", "{}/own.py:grouped"], 8),
        (["--advantage", "{}/own.py:grouped", "--config={}/run.yaml"], 2),
        (["--advantage", "{}/own.py:of_critic"], 1),
    ],
)
def test_estimators_of_groups_have_another_default(words, samples, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("num_samples_per_prompt: 2\n", encoding="utf-8")
    own = "from training.utils.plugins.objectives import Estimator\ndef plain(inputs, settings): ...\n"
    own += "grouped = Estimator(plain, needs_groups=True)\nof_critic = Estimator(plain, needs_critic=True)\n"
    (tmp_path / "own.py").write_text(own, encoding="utf-8")
    words = [word.format(tmp_path) for word in words]
    groups = parse_arguments([PpoArguments, AlgorithmArguments], words, "")
    assert resolved_settings(groups)["num_samples_per_prompt"] == samples
    does = "may compare" if words[-1:] and words[-1].endswith(":plain") else "compares"
    said = f"auto: --num_samples_per_prompt 8 (--advantage {''.join(words[-1:])} {does} the responses to a prompt)\n"
    assert capsys.readouterr().out == (said if samples == 8 else "")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--advantage", "grpo"], ["otherwise 1. [8]", "trains a critic. [grpo]"]),
        (["--advantage", "grpo", "--num_samples_per_prompt", "4"], ["otherwise 1. [4]"]),
        (["--padded"], ["otherwise 1. [1]", "trains a critic. [gae]"]),
    ],
)
def test_the_help_shows_the_defaults_of_the_method(words, shown, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(STEP.groups, [*words, "--help"], "", first_flags=STEP.first_flags)
    page = " ".join(capsys.readouterr().out.split())
    assert all(each in page for each in shown), page


def test_a_minibatch_of_several_rollouts_draws_so_many():
    """DeepSpeed-Chat's own single-GPU line: rollouts of 8, two of them accumulated."""
    ppo = PpoArguments(**batches(8, 8), gradient_accumulation_steps=2)
    assert mistakes_of(ppo) == [] and ppo.generation_batches == 2 and ppo.sequences_per_rollout == 16
    assert (
        PpoArguments(**batches(8, 8), num_samples_per_prompt=2, gradient_accumulation_steps=2).generation_batches == 1
    )
    assert dataclasses.replace(ppo).generation_batches == 2


TWO_EPOCHS = {"ppo_epochs": 2, "per_device_training_batch_size": 8}


@pytest.mark.parametrize(
    ("given", "words"),
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
        ({"stop": ["x", ""]}, "--stop expects non-empty text, got ''"),
        ({"bad_words": [""]}, "--bad_words expects non-empty text, got ''"),
        ({"reuse_forwards": True, **TWO_EPOCHS}, "--reuse_forwards needs one optimizer step per rollout, but"),
        ({"reuse_values": True, **TWO_EPOCHS}, "--reuse_values needs one optimizer step per rollout, but"),
        ({"clip_reward": -5.0}, "--clip_reward expects more than 0, got -5.0"),
        ({"eval_interval": -1}, "--eval_interval expects 0 or more, got -1"),
    ],
)
def test_mistakes(given, words):
    [said] = mistakes_of(PpoArguments(**given))
    assert said.startswith(words) and ("learns once" not in words or " make 4 steps of 1 rollouts" in said)


@pytest.mark.needs_plugin("objectives")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gamma": 1.5}, "--gamma expects a number from 0 to 1, got 1.5"),
        ({"lam": -0.1}, "--lam expects a number from 0 to 1, got -0.1"),
        ({"clip_range": 0.0}, "--clip_range expects more than 0, got 0.0"),
        ({"clip_range_low": 0.0}, "--clip_range_low expects more than 0, got 0.0"),
        ({"clip_range_high": -1.0}, "--clip_range_high expects more than 0, got -1.0"),
        ({"clip_range_value": 0.0}, "--clip_range_value expects more than 0, got 0.0"),
        ({"kl_target": 0.0}, "--kl_target expects more than 0, got 0.0"),
        ({"kl_horizon": 0.0}, "--kl_horizon expects more than 0, got 0.0"),
        ({"dual_clip": 1.0}, "--dual_clip expects more than 1, got 1.0"),
        ({"kl_coef": -0.1}, "--kl_coef expects 0 or more, got -0.1"),
        ({"entropy_coef": -0.1}, "--entropy_coef expects 0 or more, got -0.1"),
        ({"critic_warmup": -1}, "--critic_warmup expects 0 or more, got -1"),
        ({"dynamic_sampling_tries": -1}, "--dynamic_sampling_tries expects 0 or more, got -1"),
        ({"missing_eos_penalty": -1.0}, "--missing_eos_penalty expects 0 or more, got -1.0"),
        ({"overlong_penalty": -1.0}, "--overlong_penalty expects 0 or more, got -1.0"),
        ({"kl_in": "rewards"}, "--kl_in expects one of reward, loss, got 'rewards'; did you mean 'reward'?"),
        (
            {"stop_kl": 3.0, "kl_coef": 0.0},
            "--stop_kl 3.0 needs the KL to the reference, but --kl_coef 0 loads no reference",
        ),
        (
            {"kl_estimator": "k3+"},
            "--kl_estimator k3+ is k3 with the gradient of k2, but the KL in the reward has no gradient",
        ),
        (
            {"norm_adv_over": "batch"},
            "--norm_adv_over batch needs --advantage grpo, rloo or grpo_passk, got gae",
        ),
        (
            {"norm_adv_over": "batch", "advantage": "grpo", "norm_adv_by_std": False},
            "--norm_adv_over batch divides by a standard deviation, but --norm_adv_by_std is false",
        ),
        ({"stop_update_kl": 0.0}, "--stop_update_kl expects more than 0, got 0.0"),
        ({"kl_control": "pid"}, "--kl_control expects one of fixed, adaptive, got 'pid'; did you mean 'fixed'?"),
        ({"kl_control": "adaptive", "kl_coef": 0.0}, "--kl_control adaptive multiplies --kl_coef, which is 0"),
    ],
)
def test_mistakes_of_the_algorithm(given, words):
    [said] = mistakes_of(AlgorithmArguments(**given))
    assert said.startswith(words)


def test_a_batch_size_of_zero_is_told_and_divides_nothing():
    assert len(mistakes_of(PpoArguments(per_device_training_batch_size=0))) == 2


def test_sequences_of_a_rank():
    more = {"num_samples_per_prompt": 4, "generation_batches": 2, "gradient_accumulation_steps": 3}
    ppo = PpoArguments(**batches(6, 8, **more))
    assert (ppo.sequences_per_rollout, ppo.sequences_per_minibatch) == (48, 24)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"actor_model_name_or_path": ""},
            "--actor_model_name_or_path is not set; set it to step 1's model (a folder or a hub name)",
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
    common = {"dtype": "fp32", "offload": True, "lr_scheduler_type": "linear", "num_warmup_steps": 11}
    given = roles(
        actor_learning_rate=0.1, critic_learning_rate=0.2, actor_weight_decay=0.3, critic_weight_decay=0.4,
        actor_zero_stage=1, critic_zero_stage=2, actor_gradient_checkpointing=True, actor_dropout=0.5,
        critic_dropout=0.6, max_grad_norm=12.0, **common,
    )  # fmt: skip
    assert given.model("actor") == ModelSettings("a", dropout=0.5, gradient_checkpointing=True, takes_media=True)
    assert given.model("critic") == ModelSettings("c", dropout=0.6, takes_media=True)
    engine = EngineSettings(max_grad_norm=12.0, **common)
    assert given.engine("actor") == dataclasses.replace(engine, zero_stage=1, learning_rate=0.1, weight_decay=0.3)
    assert given.engine("critic") == dataclasses.replace(engine, zero_stage=2, learning_rate=0.2, weight_decay=0.4)
