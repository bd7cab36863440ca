"""The flags of one trained model, shared by steps 1 and 2. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass

from training.utils.models.attention import CHOICES
from training.utils.models.settings import ModelSettings
from training.utils.run.errors import Mistakes
from training.utils.run.flags import flag, settings_of


@dataclass
class ModelArguments:
    """Which model is trained, and which of its weights."""

    model_name_or_path: str = flag("", "Folder or hub name of the model to start from.")
    pad_token: str | None = flag(None, "The token of the tokenizer to pad with, if it has no pad token.")
    trust_remote_code: bool = flag(
        ModelSettings.trust_remote_code, "Run Python code that comes with the model or its tokenizer. Read it first."
    )
    attn_implementation: str = flag(
        ModelSettings.attn_implementation,
        "'auto' takes, on CUDA, the first that computes the model's own numbers: 'varlen' (torch's kernel for runs, in "
        "bf16 and fp16), 'flex_attention', 'sdpa' (runs everywhere; on CUDA with a dense mask). 'flash_attention_2' or "
        "'_3', if installed, packs but shares no prompts.",
        choices=CHOICES,
    )
    dropout: float | None = flag(
        None,
        "Every dropout rate; 0 also switches off layer drop and routers' jitter; default: the model's own.",
        least=0,
        below=1,
    )
    router_aux_loss_coef: float | None = flag(
        None,
        "Mixtures of experts: weight of the routers' balancing loss (Fedus et al. 2021); default: the model's own; "
        "0 adds none.",
        least=0,
    )
    gradient_checkpointing: bool = flag(False, "Recompute activations: less memory.")
    torch_compile: bool = flag(
        False,
        "Compile the model's blocks with torch.compile (needs a C++ compiler on a CPU). Seen to give the "
        "same losses under ZeRO 0, 2 and 3, with LoRA and gradient checkpointing; ZeRO 3 leaves little to fuse. "
        "The first steps compile for half a minute to minutes: for long runs.",
    )
    lora_dim: int = flag(0, "Rank of LoRA adapters; 0 trains without them.", least=0)
    lora_alpha: float = flag(16.0, "LoRA's scale is alpha / rank.")
    lora_dropout: float = flag(0.0, "Dropout before the adapters.", least=0, below=1)
    lora_module_name: str = flag(
        "all-linear", "'all-linear', or parts of the names of the linear layers that get adapters, separated by commas."
    )
    only_optimize_lora: bool = flag(True, "With LoRA: freeze every other weight (a scalar head still trains).")

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake in these settings."""
        mistakes.require(
            bool(self.model_name_or_path),
            "--model_name_or_path expects the folder or hub name of a model, got nothing; "
            "`python -m training.new_model --out DIR` makes one with random weights",
        )

    def settings(self) -> ModelSettings:
        return settings_of(ModelSettings, self, name_or_path=self.model_name_or_path)
