"""TRL's counts of a batch of GRPO, RLOO and PPO, in ours.

TRL counts completions: `per_device_train_batch_size` of them are one forward of a rank, `gradient_accumulation_steps`
forwards one optimizer step, and `steps_per_generation` forwards one rollout, which has `num_generations` completions of
each prompt. Here a rollout is counted in prompts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from threestep.plugins.names.other_names import whole_number
from training.utils.base.errors import ThreestepError

FORWARD, PROMPTS = "--per_device_training_batch_size", "--per_device_generation_batch_size"
SAMPLES = "--num_samples_per_prompt"
# Flags that tell a command line of TRL's: names of its GRPO, RLOO and PPO that no other program has.
ITS = (
    "--model_name_or_path", "--sft_model_path", "--reward_model_path", "--reward_model_name_or_path", "--reward_funcs",
    "--reward_weights", "--num_generations", "--num_generations_eval", "--generation_batch_size",
    "--steps_per_generation", "--num_mini_batches", "--max_prompt_length", "--max_completion_length",
    "--response_length", "--num_iterations", "--num_ppo_epochs", "--beta", "--epsilon", "--epsilon_high", "--delta",
    "--cliprange", "--cliprange_value", "--loss_type", "--scale_rewards", "--importance_sampling_level",
    "--mask_truncated_completions", "--use_vllm", "--vllm_mode",
)  # fmt: skip
_GENERATIONS = {"grpo": 8, "rloo": 2}  # TRL's defaults of num_generations
_FORWARD = 8  # and of per_device_train_batch_size


def is_trls(given: Mapping[str, str]) -> bool:
    """Return True if a command line of step 3 counts as TRL does. given: its flags as they were typed"""
    return any(flag in given for flag in ITS)


def batch_words(given: Mapping[str, str], present: set[str]) -> tuple[list[str], list[str]]:
    """The counts that a command line of TRL's leaves out, as words in ours, and a line about them.

    present: our flags that have a value; ThreestepError where a rank's rollout is not whole groups.
    """
    values = {FORWARD: _forward(given), SAMPLES: _generations(given), PROMPTS: 0}
    if PROMPTS not in present:
        values[PROMPTS] = prompts(given)
    words = [word for flag, value in values.items() if flag not in present for word in (flag, str(value))]
    why = f"because {next(flag for flag in ITS if flag in given)} is TRL's"
    if PROMPTS in present:
        return words, [f"{' '.join(words)}: TRL's default, {why}"] if words else []
    line = (
        f"{PROMPTS} is {values[PROMPTS]}, counted as in TRL, {why}: each rollout has {values[FORWARD]} x "
        f"{_forwards(given)} completions, {values[SAMPLES]} per prompt"
    )
    return words, [line]


def prompts(given: Mapping[str, str]) -> int:
    """Prompts of a rank's rollout."""
    forward, forwards, generations = _forward(given), _forwards(given), _generations(given)
    if forward * forwards % generations:
        raise ThreestepError(
            f"each rank generates {forward} x {forwards} completions (--per_device_train_batch_size x "
            "--steps_per_generation, which defaults to --gradient_accumulation_steps); this must be a multiple of "
            f"{generations} (--num_generations), because one rank generates all completions of a prompt; raise one "
            "of the first two"
        )
    return forward * forwards // generations


def rollouts(steps: int, given: Mapping[str, str]) -> int:
    """Rollouts with as many optimizer steps, of TRL's --max_steps, at least."""
    passes = _count("--num_iterations", given, _count("--num_ppo_epochs", given, 1))
    return -(-steps * _count("--gradient_accumulation_steps", given, 1) // (_forwards(given) * passes))


def _forwards(given: Mapping[str, str]) -> int:
    """Forwards of a rank whose completions are drawn together."""
    accumulated = _count("--gradient_accumulation_steps", given, 1)
    whole = _count("--generation_batch_size", given, 0)
    if not whole:
        return _count("--steps_per_generation", given, accumulated * _count("--num_mini_batches", given, 1))
    ranks = int(os.environ.get("WORLD_SIZE") or "1")
    if whole % (_forward(given) * ranks):
        raise ThreestepError(
            f"--generation_batch_size must be a multiple of --per_device_train_batch_size {_forward(given)} x "
            f"{ranks} ranks, got {whole}"
        )
    return whole // (_forward(given) * ranks)


def _forward(given: Mapping[str, str]) -> int:
    return _count("--per_device_train_batch_size", given, _count(FORWARD, given, _FORWARD))


def _generations(given: Mapping[str, str]) -> int:
    default = _GENERATIONS.get(given.get("--advantage", ""), 1)
    return _count("--num_generations", given, _count(SAMPLES, given, default))


def _count(flag: str, given: Mapping[str, str], default: int) -> int:
    """The flag's number; ThreestepError unless it is a whole number above 0. None is no number, as for TRL."""
    value = given.get(flag, "none")
    if value.lower() in ("none", "null", ""):
        return default
    number = whole_number(flag, value)
    if number < 1:
        raise ThreestepError(f"{flag} must be a whole number above 0, got {value}")
    return number
