"""The DeepSpeed configuration: built from flags, or the user's JSON with the missing keys filled in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training.utils.engine.arguments import EngineSettings
from training.utils.engine.refused_keys import refused_keys
from training.utils.run.errors import Mistakes, ThreestepError, nearest_names

_DTYPE_SECTIONS = ("bf16", "fp16")  # each under the name of its --dtype


def deepspeed_config(settings: EngineSettings, ranks: int, trainable_elements: int, on_gpu: bool) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize`.

    The planner sets batch sizes, so DeepSpeed gets one sequence per rank, and accumulation that ends when the caller
    calls step().
    """
    ours = _from_flags(settings, ranks, trainable_elements, on_gpu)
    if settings.deepspeed_config is None:
        return ours
    theirs = users_config(settings.deepspeed_config)
    _check_users_config(theirs, settings)
    final = _filled_in(theirs, ours)
    for section in _DTYPE_SECTIONS:
        if final.get(section, {}).get("enabled") == "auto":  # --dtype is another one
            final[section] = {**final[section], "enabled": False}
    return final


def filled_in_keys(theirs: dict[str, Any], final: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the dotted keys of `final` that the user's configuration lacks or sets to "auto"."""
    names: list[str] = []
    for key, value in final.items():
        if theirs.get(key, "auto") == "auto":
            names.append(prefix + key)
        elif isinstance(value, dict):
            names += filled_in_keys(theirs[key], value, f"{prefix}{key}.")
    return names


def _from_flags(settings: EngineSettings, ranks: int, trainable_elements: int, on_gpu: bool) -> dict[str, Any]:
    stage = settings.zero_stage
    # DeepSpeed's default buckets (5e8 elements) are allocated in full: 2 GB for a model of any size.
    # Even, as half precision requires (deepspeed 0.19, stage_1_and_2.py: nccl_start_alignment_factor).
    bucket = max(2, min(500_000_000, trainable_elements + trainable_elements % 2))
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": on_gpu and stage >= 2,  # with caller-owned accumulation DeepSpeed allows it from stage 2
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if stage == 3:
        # DeepSpeed-Chat's values: parameters below 1e4 elements stay whole; up to 3e7 may be live or prefetched.
        zero["stage3_param_persistence_threshold"] = 10_000
        zero["stage3_max_live_parameters"] = 30_000_000
        zero["stage3_prefetch_bucket_size"] = 30_000_000
    if settings.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": on_gpu}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": on_gpu}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": ranks,
        "managed_gradient_accumulation": False,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": settings.max_grad_norm,
        "steps_per_print": 2**31 - 1,
        "wall_clock_breakdown": False,
        # Otherwise DeepSpeed waits for the device in each forward and step, to time what nobody reads.
        "timers": {"throughput": {"enabled": False}},
    }
    if settings.dtype == "bf16":
        config["bf16"] = {"enabled": True}
        if stage > 0:  # stage 0 refuses it; its gradients accumulate in bfloat16
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    if settings.dtype == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale_window": 100}
    return config


def users_config(path: str) -> dict[str, Any]:
    """Return the object in the JSON file of --deepspeed_config; ThreestepError if there is none."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise ThreestepError(f"cannot read --deepspeed_config {path}: {problem.strerror}") from problem
    except (ValueError, RecursionError) as problem:  # no JSON, no UTF-8, a number too long, nested too deep
        raise ThreestepError(f"--deepspeed_config {path} is not valid JSON: {problem}") from problem
    if not isinstance(values, dict):
        raise ThreestepError(f"--deepspeed_config {path}: expected an object, got a {type(values).__name__}")
    return values


def _check_users_config(theirs: dict[str, Any], settings: EngineSettings) -> None:
    """Refuse what contradicts the flags, what the planner sets, and keys that DeepSpeed would silently ignore."""
    where = settings.deepspeed_config
    mistakes = Mistakes()
    for section, names in _known_keys().items():
        values = theirs.get(section, {}) if section else theirs
        if not isinstance(values, dict):
            mistakes.add(f"{where}: '{section}' expects an object, got a {type(values).__name__}")
            continue
        for key in values:
            if key not in names:
                dotted = f"{section}.{key}".lstrip(".")
                mistakes.add(f"{where}: DeepSpeed has no key '{dotted}'{nearest_names(key, names)}")
    mistakes.raise_if_any()  # what follows reads inside the sections
    owned = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "managed_gradient_accumulation",
        "optimizer",
        "scheduler",
    )
    for refusal in refused_keys(theirs):
        mistakes.add(f"{where}: {refusal}")
    for key in owned:
        if theirs.get(key, "auto") != "auto":
            mistakes.add(f"{where}: '{key}' is set by Threestep's flags; remove it or write \"auto\"")
    mistakes.require(
        theirs.get("bf16", {}).get("check_grad_overflow", "auto") in ("auto", True),
        f"{where}: 'bf16.check_grad_overflow' is off, so a NaN gradient would reach the weights; remove it",
    )
    types = theirs.get("data_types", {})
    mistakes.require(
        not isinstance(types, dict) or types.get("buffer_dtype") is None,
        f"{where}: 'data_types.buffer_dtype' would round what the model computes in float32, such as rotary "
        "frequencies; remove it",
    )
    stage = theirs.get("zero_optimization", {}).get("stage", "auto")
    if stage not in ("auto", settings.zero_stage):
        mistakes.add(f"{where} sets ZeRO stage {stage} and --zero_stage is {settings.zero_stage}; make them agree")
    for dtype in _DTYPE_SECTIONS:
        enabled = theirs.get(dtype, {}).get("enabled", "auto")
        if enabled not in ("auto", settings.dtype == dtype):
            does = "enables" if enabled else "disables"
            mistakes.add(f"{where} {does} {dtype} and --dtype is {settings.dtype}; make them agree")
    mistakes.raise_if_any()


def _known_keys() -> dict[str, set[str]]:
    """Return DeepSpeed's keys: "", of the whole, and those of the sections that decide how a model is trained."""
    from deepspeed.runtime import constants
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    spelled = {value for value in vars(constants).values() if isinstance(value, str) and value.islower()}
    # Sections defined outside of that module (deepspeed 0.19, runtime/config.py).
    spelled |= {
        "zero_optimization", "bf16", "fp16", "flops_profiler", "aio", "comms_logger", "activation_checkpointing",
        "data_efficiency", "curriculum_learning", "compression_training", "elasticity", "tensorboard", "wandb",
        "csv_monitor", "autotuning", "compile", "hybrid_engine", "checkpoint", "data_types", "amp",
        "zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer", "tensor_parallel", "torch_autocast",
    }  # fmt: skip
    sections = {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}
    return {"": spelled} | {
        section: {key for name, field in fields.model_fields.items() for key in (name, field.alias) if key}
        for section, fields in sections.items()
    }


def _filled_in(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    final = dict(theirs)
    for key, value in ours.items():
        if key not in final or final[key] == "auto":
            final[key] = value
        elif isinstance(value, dict) and isinstance(final[key], dict):
            final[key] = _filled_in(final[key], value)
    return final
