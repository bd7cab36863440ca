"""The settings of a model's adapters. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoraSettings:
    """Adapters of a rank of 1 or more. The fields are the flags' but for `lora_alpha`: the scale is alpha / rank, also
    with rsLoRA.

    use_dora: adapters have a magnitude for each output of their layer (Liu et al. 2024, arXiv:2402.09353).
    """

    lora_dim: int
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    lora_module_name: str = "all-linear"
    use_dora: bool = False
    only_optimize_lora: bool = True
    lora_learning_rate: float | None = None
