"""How one model is trained under DeepSpeed, as one record. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass

ADAM_BETAS = (0.9, 0.95)  # GPT-3 (Brown et al. 2020, appendix B); the same as DeepSpeed-Chat's


@dataclass(frozen=True)
class EngineSettings:
    """learning_rate: the schedule's peak.
    lora_learning_rate: of LoRA's adapters; None: the same.
    max_grad_norm: over all weights and ranks; 0 turns clipping off.
    """

    dtype: str = "fp32"
    zero_stage: int = 0
    offload: bool = False
    deepspeed_config: str | None = None
    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    lr_scheduler_type: str = "cosine"
    num_warmup_steps: int = 0
    max_grad_norm: float = 1.0
    lora_learning_rate: float | None = None
