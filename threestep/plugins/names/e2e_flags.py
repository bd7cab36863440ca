"""DeepSpeed-Chat's e2e_rlhf.py: its flags, and the settings of the scripts that it runs, as all_steps reads a file.

It runs one script a step, by the size of the model and the kind of machines. What the scripts leave out is a default of
ours (from_deepspeed_chat.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from threestep.plugins.names.other_names import flags_with_values
from training.utils.base.errors import Mistakes

NAME = "e2e_rlhf.py"
SINGLE_GPU, SINGLE_NODE, MULTI_NODE = "single_gpu", "single_node", "multi_node"
_HOSTFILE = "THREESTEP_HOSTFILE"
_DEFAULTS = {"actor_model": "1.3b", "reward_model": "350m", "deployment_type": SINGLE_GPU}
_FLAGS = {
    "actor_model": "facebook/opt-* model for the actor: 1.3b, 6.7b, 13b or 66b",
    "reward_model": "facebook/opt-* model for the reward model: 350m",
    "actor_zero_stage": "ZeRO stage of the actor in steps 1 and 3",
    "reward_zero_stage": "ZeRO stage of the reward model and the critic in steps 2 and 3",
    "deployment_type": f"{SINGLE_GPU}, {SINGLE_NODE} (one rank per GPU) or {MULTI_NODE} ({_HOSTFILE})",
}
_FAMILY = "facebook/opt-"
_ONE = "--data_path Dahoas/rm-static"
_FOUR = f"{_ONE} Dahoas/full-hh-rlhf Dahoas/synthetic-instruct-gptj-pairwise yitingxie/rlhf-reward-datasets"
_LENGTH = "--max_seq_len 512"
_RECOMPUTED = "--gradient_checkpointing true"
_LORA = "--lora_dim 128 --lora_module_name decoder.layers."
_ACTOR_LORA = "--actor_lora_dim 128 --actor_lora_module_name decoder.layers."
_ACTOR_RECOMPUTED = "--actor_gradient_checkpointing true"
_DECAY = "--actor_weight_decay 0.1 --critic_weight_decay 0.1"


def _sft(batch: int, rate: str, epochs: int, zero: int, *, more: str = "") -> str:
    sizes = f"--per_device_train_batch_size {batch} --per_device_eval_batch_size {batch}"
    return f"{_FOUR} {_LENGTH} {sizes} --learning_rate {rate} --num_train_epochs {epochs} --zero_stage {zero} {more}"


def _reward(batch: int) -> str:
    sizes = f"--per_device_train_batch_size {batch} --per_device_eval_batch_size {batch}"
    return f"{_FOUR} {_LENGTH} {sizes} --learning_rate 5e-5 --weight_decay 0.1 --dropout 0.0 --zero_stage 0"


def _ppo(batch: int, rate: str, zero: int, more: str) -> str:
    sizes = f"--per_device_generation_batch_size {batch} --per_device_training_batch_size {batch}"
    stages = f"--actor_zero_stage {zero} --critic_zero_stage {zero}"
    rates = f"--actor_learning_rate {rate} --critic_learning_rate 5e-6 --num_warmup_steps 100"
    lengths = "--max_answer_seq_len 256 --max_prompt_seq_len 256"
    return f"{_ONE} {lengths} {sizes} {rates} --actor_dropout 0.0 {stages} {more}"


_SFT = {
    (SINGLE_GPU, "1.3b"): f"{_ONE} --gradient_accumulation_steps 8 --lora_dim 128 --zero_stage 0",
    (SINGLE_NODE, "1.3b"): _sft(8, "9.65e-6", 16, 2),
    (SINGLE_NODE, "6.7b"): _sft(6, "9.65e-6", 16, 3, more=_RECOMPUTED),
    (SINGLE_NODE, "13b"): _sft(4, "1e-4", 16, 3, more=f"{_RECOMPUTED} {_LORA}"),
    (MULTI_NODE, "66b"): _sft(4, "1e-4", 2, 3, more=f"{_RECOMPUTED} {_LORA} --weight_decay 0.1"),
}
_REWARD = {
    SINGLE_GPU: f"{_ONE} --weight_decay 0.1 --gradient_accumulation_steps 4 --dropout 0.0 --zero_stage 0",
    SINGLE_NODE: _reward(4),
    MULTI_NODE: _reward(2),
}
_PPO = {
    (SINGLE_GPU, "1.3b"): f"{_ONE} --actor_zero_stage 0 --critic_zero_stage 0 --gradient_accumulation_steps 2 "
    f"--actor_lora_dim 128 {_ACTOR_RECOMPUTED} --actor_dropout 0.0",
    (SINGLE_NODE, "1.3b"): _ppo(4, "9.65e-6", 2, "--enable_ema true"),
    (SINGLE_NODE, "6.7b"): _ppo(4, "9.65e-6", 3, f"{_ACTOR_RECOMPUTED} {_DECAY}"),
    (SINGLE_NODE, "13b"): _ppo(16, "5e-4", 3, f"{_ACTOR_RECOMPUTED} {_ACTOR_LORA}"),
    (MULTI_NODE, "66b"): _ppo(4, "5e-4", 3, f"{_ACTOR_RECOMPUTED} {_ACTOR_LORA} {_DECAY}"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Give a parser the flags, as e2e_rlhf.py spells them."""
    group = parser.add_argument_group("instead of --config, as in DeepSpeed-Chat's e2e_rlhf.py")
    for name, text in _FLAGS.items():
        group.add_argument(f"--{name.replace('_', '-')}", dest=name, help=text)


def given_flags(options: argparse.Namespace) -> dict[str, str]:
    """Those of the flags that a command line has, with their values."""
    found = {name: getattr(options, name) for name in _FLAGS}
    return {name: value for name, value in found.items() if value not in (None, "")}


def settings_of(given: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Settings of a file for all_steps. ThreestepError for a size or kind of machines that has no script."""
    chosen = {**_DEFAULTS, **{name: value.removeprefix(_FAMILY) for name, value in given.items()}}
    actor, reward, kind = chosen["actor_model"], chosen["reward_model"], chosen["deployment_type"]
    mistakes = Mistakes()
    mistakes.require(
        (kind, actor) in _SFT,
        f"DeepSpeed-Chat has no script for --deployment-type {kind} with --actor-model {actor}, only for "
        f"{', '.join(f'{size} on {place}' for place, size in _SFT)}; write a file for --config instead",
    )
    mistakes.require(
        reward == "350m",
        f"--reward-model expects 350m, the only size with scripts in DeepSpeed-Chat, got {reward}; for another "
        "size, write a file for --config",
    )
    for name in ("actor_zero_stage", "reward_zero_stage"):
        stage = chosen.get(name, "0")
        mistakes.require(stage in ("0", "1", "2", "3"), f"--{name.replace('_', '-')} expects 0, 1, 2 or 3, got {stage}")
    mistakes.require(
        kind != MULTI_NODE or bool(environment.get(_HOSTFILE)),
        f"--deployment-type {MULTI_NODE} needs {_HOSTFILE} to name a file with a line `HOST slots=RANKS` per host; "
        "set it",
    )
    mistakes.raise_if_any()
    sections = {
        "step1_sft": _section(_SFT[kind, actor]),
        "step2_reward": {**_section(_REWARD[kind]), "model_name_or_path": f"{_FAMILY}{reward}"},
        "step3_ppo": _section(_PPO[kind, actor]),
    }
    for stage, places in (
        ("actor_zero_stage", (("step1_sft", "zero_stage"), ("step3_ppo", "actor_zero_stage"))),
        ("reward_zero_stage", (("step2_reward", "zero_stage"), ("step3_ppo", "critic_zero_stage"))),
    ):
        for step, flag in places if stage in chosen else ():
            sections[step][flag] = chosen[stage]
    return {
        "output_dir": "./output",
        "ranks": 1 if kind == SINGLE_GPU else None,
        "model_name_or_path": f"{_FAMILY}{actor}",
        "shared": {"data_split": "2,4,4"},
        **sections,
    }


def _section(flags: str) -> dict[str, Any]:
    """A command line's flags as a file's section."""
    values = flags_with_values(flags.split())
    return {
        name.removeprefix("--"): value.split() if name == "--data_path" else value for name, value in values.items()
    }
