"""The flags of one trained model, shared by steps 1 and 2. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.utils.models.attention import check_implementation
from training.utils.models.settings import ModelSettings
from training.utils.run.errors import Mistakes


@dataclass
class ModelArguments:
    """Which model is trained, and which of its weights."""

    model_name_or_path: str = field(default="", metadata={"help": "Folder or hub name of the model to start from."})
    pad_token: str | None = field(
        default=None, metadata={"help": "A token of the tokenizer to pad with, where it names none itself."}
    )
    trust_remote_code: bool = field(
        default=ModelSettings.trust_remote_code,
        metadata={"help": "Run Python code that comes with the model or its tokenizer: only where you have read it."},
    )
    attn_implementation: str = field(
        default="sdpa",
        metadata={
            "help": "'sdpa' runs everywhere; on CUDA 'flex_attention' skips what nobody sees, and 'flash_attention_2' "
            "or '_3', where installed, packs but shares no prompts."
        },
    )
    dropout: float | None = field(default=None, metadata={"help": "Every dropout rate; default: the model's own."})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "Recompute activations: less memory."})
    torch_compile: bool = field(
        default=False,
        metadata={
            "help": "Compile the model's blocks with torch.compile (on a CPU that needs a C++ compiler). Seen to give "
            "the same losses under ZeRO 0, 2 and 3, with LoRA and gradient checkpointing; under ZeRO 3 little is "
            "fused. The first steps compile for half a minute to minutes: for long runs."
        },
    )
    lora_dim: int = field(default=0, metadata={"help": "Rank of LoRA adapters; 0 trains without them."})
    lora_alpha: float = field(default=16.0, metadata={"help": "LoRA's scale is alpha / rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapters."})
    lora_module_name: str = field(
        default="all-linear",
        metadata={"help": "'all-linear', or a part of the names of the linear layers that get adapters."},
    )
    only_optimize_lora: bool = field(
        default=True, metadata={"help": "With LoRA: freeze every other weight (a scalar head still trains)."}
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note what is wrong with these settings."""
        mistakes.require(
            bool(self.model_name_or_path),
            "--model_name_or_path expects the folder or hub name of a model, got nothing; "
            "`python -m training.new_model --out DIR` makes one with random weights",
        )
        check_implementation(mistakes, self.attn_implementation)
        check_lora(mistakes, self.lora_dim, self.lora_dropout)
        check_dropout(mistakes, "--dropout", self.dropout)

    def settings(self) -> ModelSettings:
        return ModelSettings(
            name_or_path=self.model_name_or_path,
            attn_implementation=self.attn_implementation,
            dropout=self.dropout,
            gradient_checkpointing=self.gradient_checkpointing,
            torch_compile=self.torch_compile,
            lora_dim=self.lora_dim,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            lora_module_name=self.lora_module_name,
            only_optimize_lora=self.only_optimize_lora,
            trust_remote_code=self.trust_remote_code,
        )


def check_lora(mistakes: Mistakes, dim: int, dropout: float) -> None:
    """Note an adapter rank or dropout that cannot be."""
    mistakes.require(dim >= 0, f"a LoRA rank is 0 (none) or more, got {dim}")
    check_dropout(mistakes, "--lora_dropout", dropout)


def check_dropout(mistakes: Mistakes, flag: str, rate: float | None) -> None:
    """Note a dropout rate outside [0, 1)."""
    mistakes.require(rate is None or 0.0 <= rate < 1.0, f"{flag} expects a share from 0 up to below 1, got {rate}")
