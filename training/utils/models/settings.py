"""How one model is loaded and which of its weights train, as one record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSettings:
    """name_or_path: folder or hub name. attn_implementation: see training.utils.models.attention. dropout: every
    dropout rate of the model, None keeps the model's own. lora_*: see training.utils.models.lora.
    gradient_checkpointing: recompute activations in backward. torch_compile: see training.utils.models.compiled.
    trust_remote_code: run Python that comes with the model."""

    name_or_path: str
    attn_implementation: str = "sdpa"
    dropout: float | None = None
    gradient_checkpointing: bool = False
    torch_compile: bool = False
    lora_dim: int = 0
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    lora_module_name: str = "all-linear"
    only_optimize_lora: bool = True
    trust_remote_code: bool = False

    def as_it_is(self) -> ModelSettings:
        """The same model, to be read and not trained."""
        return ModelSettings(self.name_or_path, trust_remote_code=self.trust_remote_code)
