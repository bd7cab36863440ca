"""Keys of DeepSpeed's JSON that would hang a run, end it in an assertion, or change nothing without a word (deepspeed
0.19), each with what to do in their place."""

from __future__ import annotations

from typing import Any

_TRACKERS = "writes figures that Threestep's own trackers write; remove it and see --report_to"
_DATA = "shapes batches that DeepSpeed makes, and Threestep plans its own; remove it"
_REMOVED = "DeepSpeed no longer has; remove it"
_QUANTIZED = "wants a compiled operator of DeepSpeed, and rounds what Threestep holds exact; remove it"
_NO_EFFECT = "changes nothing in a run of Threestep; remove it"

# A dotted key, and what the sentence says after its name.
REFUSED = {
    "tensor_parallel": "(AutoTP) waits for ever in a collective here; remove it and use --zero_stage 3",
    "compile": "(DeepCompile) ends in an assertion under Threestep's loop; remove it and use --torch_compile",
    "activation_checkpointing": (
        "is read by models that call DeepSpeed's own checkpointing, and these do not; use --gradient_checkpointing"
    ),
    "aio": "serves NVMe alone, which wants a compiled operator of DeepSpeed; remove it and use --offload",
    "hybrid_engine": "is DeepSpeed-Chat's, and does nothing on transformers 5; remove it",
    "torch_autocast": "would change the precision that --dtype sets; remove it",
    "gradient_allreduce_op": "would leave gradients unaveraged, and Threestep's scale undoes the average; remove it",
    "data_efficiency": _DATA,
    "dataloader_drop_last": _DATA,
    "autotuning": "starts runs of its own; remove it and see --dry_run",
    "flops_profiler": "prints what Threestep silences; remove it and read train/mfu",
    "tensorboard": _TRACKERS,
    "wandb": _TRACKERS,
    "csv_monitor": _TRACKERS,
    "curriculum_learning": _REMOVED,
    "compression_training": _REMOVED,
    "elasticity": _REMOVED,
    "amp": _REMOVED,
    "vocabulary_size": _NO_EFFECT,
    "zero_optimization.zenflow": "is an optimizer of its own beside Threestep's; remove it and use --offload",
    "zero_optimization.zero_quantized_weights": _QUANTIZED,
    "zero_optimization.zero_quantized_nontrainable_weights": _QUANTIZED,
    "zero_optimization.zero_quantized_gradients": _QUANTIZED,
    "zero_optimization.elastic_checkpoint": _NO_EFFECT,
    "zero_optimization.legacy_stage1": _NO_EFFECT,
    "zero_optimization.save_muon_momentum_buffer_in_memory": _NO_EFFECT,
}


def refused_keys(theirs: dict[str, Any]) -> list[str]:
    """Return "'KEY' REASON" for each refused key that `theirs` sets. A key that is switched off is let through."""
    found = []
    zero = theirs.get("zero_optimization", {})
    for dotted, reason in REFUSED.items():
        section, _, key = dotted.rpartition(".")
        if not _is_off((zero if section else theirs).get(key)):
            found.append(f"'{dotted}' {reason}")
    for section in ("offload_param", "offload_optimizer"):
        offload = zero.get(section)
        if isinstance(offload, dict) and offload.get("device") == "nvme":
            found.append(
                f"'zero_optimization.{section}.device' is nvme, which wants a compiled operator of DeepSpeed; write cpu"
            )
    return found


def _is_off(value: Any) -> bool:
    """Nothing, "auto", the value that DeepSpeed has without the key, or a section that is empty or not enabled."""
    if isinstance(value, dict):
        return not value or not value.get("enabled", value.get("deepcompile", True))
    return value in (None, False, "auto", "mean")
