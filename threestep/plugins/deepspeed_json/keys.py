"""Every key of DeepSpeed's JSON (deepspeed 0.19), by its dotted name: where it is honoured, or why it is refused.

`tests/invariants/test_deepspeed_keys.py` runs each accepted key and sees what it changes. The tests of this plugin hold
these tables against the installed DeepSpeed, so that a key of a new version is not taken for a known one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from training.utils.flags.added import advice

# What runs: ZeRO stages; "1bf16" is stage 1 in bfloat16 with float32 sums, where DeepSpeed has another optimizer.
_ANYWHERE = "0 1 1bf16 2 3"
_FP16 = "1 2 3"  # not at stage 0: `check_stage`
_SHARDED = "1 1bf16 2 3"
_PREFIX = "zero_optimization."

# Where each accepted key changes a run.
ACCEPTED = {
    "gradient_clipping": _ANYWHERE,
    "communication_data_type": _ANYWHERE,
    "disable_python_gc": _ANYWHERE,
    "log_level": _ANYWHERE,
    "steps_per_print": _ANYWHERE,
    "dump_state": _ANYWHERE,
    "wall_clock_breakdown": _ANYWHERE,
    "memory_breakdown": _ANYWHERE,
    "comms_logger.enabled": _ANYWHERE,
    "comms_logger.verbose": _ANYWHERE,
    "comms_logger.prof_all": _ANYWHERE,
    "comms_logger.prof_ops": _ANYWHERE,
    "comms_logger.debug": _ANYWHERE,
    "timers.throughput.enabled": _ANYWHERE,
    "timers.throughput.synchronized": _ANYWHERE,
    "data_types.grad_accum_dtype": _SHARDED,
    "bf16.enabled": _ANYWHERE,
    "bf16.immediate_grad_update": "1bf16",
    "bf16.bf16_master_weights_and_grads": "1 2 3",
    "bf16.bf16_optimizer_states": "1 2 3",
    "fp16.enabled": _FP16,
    "fp16.loss_scale": _FP16,
    "fp16.initial_scale_power": _FP16,
    "fp16.loss_scale_window": _FP16,
    "fp16.hysteresis": _FP16,
    "fp16.consecutive_hysteresis": _FP16,
    "fp16.min_loss_scale": _FP16,
} | {
    _PREFIX + key: where
    for key, where in {
        "stage": _ANYWHERE,
        "contiguous_gradients": "1 2 3",
        "reduce_scatter": "1 2 3",
        "reduce_bucket_size": "1 2 3",
        "use_multi_rank_bucket_allreduce": "1 2",
        "round_robin_gradients": "1 2",
        "parameter_alignment": "1 2",
        "overlap_comm": "2 3",
        "offload_optimizer.device": _SHARDED,
        "offload_optimizer.pin_memory": _SHARDED,
        "offload_param.device": "3",
        "offload_param.pin_memory": "3",
        "sub_group_size": "3",
        "stage3_prefetch_bucket_size": "3",
        "stage3_param_persistence_threshold": "3",
        "stage3_model_persistence_threshold": "3",
        "stage3_max_live_parameters": "3",
        "stage3_max_reuse_distance": "3",
        "stage3_use_all_reduce_for_fetch_params": "3",
        "stage3_allgather_sequential": "3",
        "leaf_module.classes": "3",
        "leaf_module.names": "3",
        "leaf_module.name_suffixes": "3",
        "zero_hpz_partition_size": "3",
        "memory_efficient_linear": "3",
        "pipeline_loading_checkpoint": "3",
        "log_trace_cache_warnings": "3",
        "enable_sanity_checks": "3",
    }.items()
}

# Names that DeepSpeed's models also take.
ALIASES = {
    _PREFIX + name: f"{_PREFIX}stage3_{name}"
    for name in (
        "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
        "max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
        "use_all_reduce_for_fetch_params", "allgather_sequential",
    )
}  # fmt: skip

# Keys that documented examples set and that nothing here reads: left out, and named in the log with the reason.
LEFT_OUT = {
    _PREFIX + "allgather_bucket_size": "DeepSpeed gathers each group of weights in one collective",
    _PREFIX + "stage3_gather_16bit_weights_on_model_save": "Threestep always saves the whole model",
    _PREFIX + "stage3_gather_fp16_weights_on_model_save": "Threestep always saves the whole model",
}

# What Threestep sets, and no JSON may.
OWNED = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "managed_gradient_accumulation", "optimizer", "scheduler", "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
)  # fmt: skip

_TRACKERS = "writes the metrics that Threestep's trackers already write; remove it and see --report_to"
_DATA = "configures batches made by DeepSpeed, but Threestep makes its own; remove it"
_REMOVED = "no longer exists in DeepSpeed; remove it"
_QUANTIZED = "needs a compiled DeepSpeed operator, and rounds values that Threestep keeps exact; remove it"
_NO_EFFECT = "has no effect in Threestep; remove it"
_DIVISION = "moves the division by the number of ranks, and fails an assertion at ZeRO stages 2 and 3; remove it"
_NVME = "is for NVMe alone, which needs a compiled DeepSpeed operator; remove it and use --offload"
_CPU_ADAM = "needs DeepSpeed's own Adam for the CPU, but Threestep trains with torch's; remove it"
_PARALLEL = "splits models in ways that Threestep does not support; remove it and use --zero_stage 3"
_OF_DTYPE = "is set by --dtype; remove it"

# The sentence after the key's name.
REFUSED = {
    "tensor_parallel": "(AutoTP) hangs in a collective here; remove it and use --zero_stage 3",
    "pipeline": _PARALLEL,
    "expert_parallel": _PARALLEL,
    "sequence_parallel_size": _PARALLEL,
    "seq_parallel_communication_data_type": _NO_EFFECT,
    "use_data_before_expert_parallelism": _NO_EFFECT,
    "compile": f"(DeepCompile) fails an assertion in Threestep's loop; remove it{''.join(advice('compile'))}",
    "activation_checkpointing": (
        "is for models that call DeepSpeed's own checkpointing, which these do not; remove it and use "
        "--gradient_checkpointing"
    ),
    "aio": _NVME,
    "hybrid_engine": "belongs to DeepSpeed-Chat and has no effect with transformers 5; remove it",
    "torch_autocast": "would change the precision that --dtype sets; remove it",
    "bfloat16": "is the old name of 'bf16'; remove it and use --dtype bf16",
    "weight_quantization": _QUANTIZED,
    "gradient_allreduce_op": "would skip the gradient averaging that Threestep's loss scale relies on; remove it",
    "prescale_gradients": _DIVISION,
    "gradient_predivide_factor": _DIVISION,
    "data_efficiency": _DATA,
    "dataloader_drop_last": _DATA,
    "autotuning": f"starts runs of its own; remove it{''.join(advice('autotuning'))}",
    "flops_profiler": "replaces torch's functions while it counts; remove it and read train/mfu",
    "checkpoint": "changes files that --resume checks and reads; remove it",
    "datastates_ckpt": "writes checkpoints that --resume cannot read; remove it",
    "tensorboard": _TRACKERS,
    "wandb": _TRACKERS,
    "csv_monitor": _TRACKERS,
    "comet": _TRACKERS,
    "disable_allgather": _NO_EFFECT,
    "vocabulary_size": _NO_EFFECT,
    **dict.fromkeys(
        (
            "nebula",
            "compression_training",
            "amp",
            "quantize_training",
            "sparse_gradients",
            "eigenvalue",
            "sparse_attention",
            "elasticity",
            "graph_harvesting",
            "curriculum_learning",
            "progressive_layer_drop",
        ),
        _REMOVED,
    ),
    "data_types.param_dtype": _OF_DTYPE,
    "data_types.keep_in_fp32_modules": "has no effect: buffers stay as the model computes them; remove it",
    "data_types.buffer_dtype": "would round what the model computes in float32, such as rotary frequencies; remove it",
    "bf16.check_grad_overflow": "is off, so a NaN gradient would reach the weights; remove it",
    "fp16.auto_cast": "would round the model's float32 inputs; remove it",
    "fp16.fp16_master_weights_and_grads": _CPU_ADAM,
} | {
    _PREFIX + key: reason
    for key, reason in {
        "allgather_partitions": _NO_EFFECT,
        "compute_grad_norm": "is off, so a NaN gradient would reach the weights; remove it",
        "load_from_fp32_weights": "is off, so a resumed run would start with rounded weights; remove it",
        "override_module_apply": "is off, so new weights would stay uninitialized; remove it",
        "ignore_unused_parameters": "is off, which fails an assertion when a weight gets no gradient; remove it",
        "elastic_checkpoint": _NO_EFFECT,
        "legacy_stage1": _REMOVED,
        "zenflow": "is a separate optimizer, but Threestep sets the optimizer; remove it and use --offload",
        "cpu_offload": "is the old name of 'offload_optimizer'; remove it and use --offload",
        "cpu_offload_param": "is the old name of 'offload_param'; remove it and use --offload",
        "cpu_offload_use_pin_memory": "is the old name of 'pin_memory'; remove it and use --offload",
        "offload_optimizer.nvme_path": _NVME,
        "offload_optimizer.buffer_count": _NVME,
        "offload_optimizer.pipeline_read": _NVME,
        "offload_optimizer.pipeline_write": _NVME,
        "offload_optimizer.fast_init": _NVME,
        "offload_optimizer.ratio": _CPU_ADAM,
        "offload_optimizer.super_offload": _CPU_ADAM,
        "offload_optimizer.cpuadam_cores_perc": _CPU_ADAM,
        "offload_param.nvme_path": _NVME,
        "offload_param.buffer_count": _NVME,
        "offload_param.buffer_size": _NVME,
        "offload_param.max_in_cpu": _NVME,
        "stage3_module_granularity_threshold": (
            "fails if it treats the whole model as one module; remove it and name modules in 'leaf_module'"
        ),
        "zero_quantized_weights": _QUANTIZED,
        "zero_quantized_nontrainable_weights": _QUANTIZED,
        "zero_quantized_gradients": _QUANTIZED,
        "save_muon_momentum_buffer_in_memory": _NO_EFFECT,
        "mics_shard_size": _REMOVED,
        "mics_hierarchical_params_gather": _REMOVED,
        "zeropp_loco_param": _REMOVED,
    }.items()
}

# DeepSpeed's values where they are not None or False: written out, they ask for nothing.
_DEFAULTS = {
    "gradient_allreduce_op": "mean",
    "gradient_predivide_factor": 1,
    "sequence_parallel_size": 1,
    "data_types.keep_in_fp32_modules": "auto",
    "bf16.check_grad_overflow": True,
    _PREFIX + "allgather_partitions": True,
    _PREFIX + "compute_grad_norm": True,
    _PREFIX + "load_from_fp32_weights": True,
    _PREFIX + "override_module_apply": True,
    _PREFIX + "ignore_unused_parameters": True,
    _PREFIX + "offload_optimizer.ratio": 1,
    _PREFIX + "stage3_module_granularity_threshold": 0,
}


def is_off(dotted: str, value: Any) -> bool:
    """True if a refused key changes nothing: null, "auto", DeepSpeed's default, or a section that is empty or not
    enabled."""
    if isinstance(value, dict):
        return not value or not value.get("enabled", value.get("deepcompile", True))
    return value in (None, "auto") or value == _DEFAULTS.get(dotted, False)


def sections() -> set[str]:
    """The dotted names that hold accepted or refused keys."""
    return {name.rpartition(".")[0] for name in (*ACCEPTED, *REFUSED, *LEFT_OUT)} - {""} | {"timers"}


def walked(theirs: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of every key, down to those whose inside is not known here."""
    known = sections()
    for key, value in theirs.items():
        dotted = prefix + key
        if dotted in known and isinstance(value, dict):
            yield from walked(value, dotted + ".")
        else:
            yield dotted, value
