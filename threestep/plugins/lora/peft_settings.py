"""PEFT's LoraConfig as flags of a run: each of its fields is honoured, or refused by name with what to write. Serves
`peft_config` of the steps as Python functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from threestep.plugins.lora.adding import END_OF_NAME
from training.utils.base.errors import ThreestepError

_NAME = "peft_config"
_FLAGS = ("lora_dim", "lora_alpha", "lora_dropout", "lora_module_name", "use_dora")
# Fields of the configuration's kind and origin, which train nothing.
_NO_EFFECT = (
    "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "task_type",
    "runtime_config", "r", "lora_alpha", "lora_dropout", "target_modules", "loftq_config", "use_dora",
)  # fmt: skip
_TASKS = {"reward": "SEQ_CLS"}
_LANGUAGE = "CAUSAL_LM"


def flags_of_adapters(config: Any, kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The flags for a peft.LoraConfig. kind: of the step: sft, reward, dpo or ppo. settings: the other flags.

    ThreestepError for another object, a field that has no counterpart, and flags beside it that say the same.
    """
    if type(config).__name__ != "LoraConfig" or not hasattr(config, "__dataclass_fields__"):
        raise ThreestepError(
            f"{_NAME} expects a peft.LoraConfig, got {type(config).__name__}; other adapter kinds are not supported"
        )
    names = dict(zip(_FLAGS, _FLAGS, strict=True))
    if kind == "ppo":
        names |= {name: f"actor_{name}" for name in ("lora_dim", "lora_module_name")}
    twice = [name for name in names.values() if name in settings]
    if twice:
        raise ThreestepError(f"{_NAME} and {', '.join(twice)} set the same thing; remove one")
    _check(config, kind)
    targets = config.target_modules
    modules = targets if targets == "all-linear" else ",".join(f"{name}{END_OF_NAME}" for name in sorted(targets))
    alpha = config.lora_alpha * config.r**0.5 if config.use_rslora else config.lora_alpha
    values = (config.r, float(alpha), float(config.lora_dropout), modules, config.use_dora)
    return {names[flag]: value for flag, value in zip(_FLAGS, values, strict=True)}


def _check(config: Any, kind: str) -> None:
    """ThreestepError for what a run does not do."""
    task = getattr(config.task_type, "value", config.task_type)
    needed = _TASKS.get(kind, _LANGUAGE)
    if task not in (None, needed):
        raise ThreestepError(f"{_NAME}.task_type expects {needed} in {kind}, got {task}; set task_type='{needed}'")
    if config.inference_mode:
        raise ThreestepError(f"{_NAME}.inference_mode expects False, got True, which trains nothing")
    targets = config.target_modules
    if targets is None:
        raise ThreestepError(
            f"{_NAME}.target_modules expects 'all-linear' or a list of names, got None, which PEFT fills in per "
            "model family; list them, such as target_modules=['q_proj', 'v_proj']"
        )
    if isinstance(targets, str) and targets != "all-linear":
        raise ThreestepError(
            f"{_NAME}.target_modules expects 'all-linear' or a list of names, got the pattern '{targets}'; write the "
            "names as a list, or use lora_module_name='PART,PART' instead of peft_config"
        )
    config = dataclasses.replace(config, use_rslora=False)  # a scale, which the flags have
    if kind == "reward" and set(config.modules_to_save or ()) == {"score"}:
        config = dataclasses.replace(config, modules_to_save=None)  # the head trains anyway
    plain = type(config)()
    for field in dataclasses.fields(config):
        given, default = getattr(config, field.name), getattr(plain, field.name)
        if field.name not in _NO_EFFECT and given != default and (given or default):
            raise ThreestepError(
                f"{_NAME}.{field.name} expects {default!r}, got {given!r}: only r, lora_alpha, lora_dropout and "
                "target_modules are supported; remove it"
            )
