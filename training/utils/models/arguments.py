"""The flags of one trained model, shared by steps 1 and 2. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from training.utils.flags.added import NO_FLAGS, AddedFlags
from training.utils.flags.flags import flag, settings_of
from training.utils.models.attention import AUTO, KERNELS, SDPA
from training.utils.models.rope_scaling import check_scaling
from training.utils.models.settings import ModelSettings, preparers_of

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


@dataclass
class ModelArguments:
    """The model to train, and which of its weights."""

    topic: ClassVar[str] = "model"

    model_name_or_path: str = flag("", "Model to start from: a folder or a hub name (required).", "model")
    pad_token: str | None = flag(None, "Pad token, for a tokenizer without one.", "token")
    trust_remote_code: bool = flag(
        ModelSettings.trust_remote_code, "Run Python code that comes with the model or its tokenizer; read it first."
    )
    attn_implementation: str = flag(
        ModelSettings.attn_implementation,
        "Attention implementation; on CUDA, 'auto' uses the first of these that matches the model's own outputs: "
        + "".join(f"'{name}'{entry.note}, " for name, entry in KERNELS.items() if entry.by_auto)
        + "'sdpa' (runs everywhere; on CUDA with a dense mask)."
        + "".join(f" '{name}'{entry.note}." for name, entry in KERNELS.items() if not entry.by_auto),
        "name",
        choices=(AUTO, SDPA, *KERNELS),
        topic="memory",
    )
    rope_scaling: str | None = flag(
        None,
        "Extend a model with rotary embeddings to FACTOR times its positions, e.g. yarn:4 (or linear:4, interpolation "
        "only); the trained model keeps the new positions, and --max_seq_len may use them all.",
        "type:factor",
        topic="length",
    )
    dropout: float | None = flag(
        None,
        "Set all dropout rates; 0 also turns off layer drop and router jitter; default: the model's own rates.",
        "0 <= probability < 1",
    )
    gradient_checkpointing: bool = flag(
        False, "Recompute activations in the backward pass: less memory, more time.", topic="memory"
    )
    head_chunk_mb: int = flag(
        0,
        "MiB of float32 logits that the output layer computes at a time; more is faster on a GPU but takes more "
        "memory. 0: chosen from the free memory when the run starts; 256 on a CPU. It affects rounding, so a resumed "
        "run keeps it.",
        "mib >= 0",
        topic="memory",
    )
    freeze_vision_tower: bool = flag(
        ModelSettings.freeze_vision_tower, "Image-text models: freeze the vision tower, except for its projector."
    )
    freeze_projector: bool = flag(
        ModelSettings.freeze_projector,
        "Image-text models: freeze the projector, which maps the tower's states to embeddings.",
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake in these settings."""
        mistakes.require(
            bool(self.model_name_or_path),
            "--model_name_or_path is not set; set it to a model's folder or hub name "
            "(`threestep new-model --out DIR` makes a model with random weights)",
        )
        check_scaling(mistakes, self.rope_scaling)

    def settings(self, added: AddedFlags = NO_FLAGS) -> ModelSettings:
        """added: flags of plugins, which may change the model."""
        own: dict[str, Any] = {"name_or_path": self.model_name_or_path, "preparers": preparers_of(added)}
        return settings_of(ModelSettings, self, **own, defaults=("trains_adapter_on", "new_head", "takes_media"))


def with_flag(argv: Sequence[str]) -> list[str]:
    """Give the words before the first flag, which are models, their flag."""
    return ["--model_name_or_path", *argv] if argv and not argv[0].startswith("-") else list(argv)
