"""The DeepSpeed configuration, built from flags; a plugin may complete the user's own with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.utils.engine.config.arguments import EngineSettings

# DeepSpeed's defaults (deepspeed 0.19, runtime/zero/config.py), in elements.
DEEPSPEED_LIMITS = {
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
}


def engine_config(
    settings: EngineSettings,
    ranks: int,
    trainable_elements: int,
    on_gpu: bool,
    *,
    limits: Mapping[str, int] = DEEPSPEED_LIMITS,
) -> dict[str, Any]:
    """Return the configuration for `deepspeed.initialize`. limits: of what ZeRO-3 gathers (`zero3_limits`).

    The planner sets batch sizes, so DeepSpeed gets one sequence per rank, and accumulation that ends when the caller
    calls step().
    """
    stage = settings.zero_stage
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": on_gpu and stage >= 2,  # with caller-owned accumulation DeepSpeed allows it from stage 2
        # DeepSpeed's default bucket (5e8 elements) is allocated in full: 2 GB for a model of any size.
        "reduce_bucket_size": max(1, min(500_000_000, trainable_elements)),
    }
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 10_000  # DeepSpeed-Chat's: smaller parameters stay whole
        zero |= limits
        if (live := settings.zero3_live_parameters) is not None:
            zero |= {"stage3_max_live_parameters": live, "stage3_max_reuse_distance": live}
    if ranks == 1 and stage in (1, 2) and not (on_gpu or settings.offload):
        zero["reduce_bucket_size"] = 1  # nothing is reduced: a gradient larger than the bucket stays where it is
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
        # It waits for the device at each forward (deepspeed 0.19, utils/timer.py).
        "timers": {"throughput": {"enabled": False}},
    }
    if settings.dtype == "bf16":
        config["bf16"] = {"enabled": True}
        if settings.bf16_optimizer_states:
            config["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
            config["data_types"] = {"grad_accum_dtype": "bf16"}
        elif stage > 0:  # stage 0 refuses it; its gradients accumulate in bfloat16
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    if settings.dtype == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale_window": 100}
    return config if settings.own_config is None else settings.own_config.completed(config, settings, ranks)
