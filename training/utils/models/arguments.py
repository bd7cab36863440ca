"""The flags of one trained model, shared by steps 1 and 2. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from training.utils.flags.added import NO_FLAGS, AddedFlags
from training.utils.flags.flags import flag, settings_of
from training.utils.models.attention.kernels import AUTO, KERNELS, SDPA
from training.utils.models.preparers import preparers_of
from training.utils.models.rope_scaling import check_scaling
from training.utils.models.settings import ModelSettings

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


class AdapterFlags(Protocol):
    """Flags of the kind of adapters."""

    use_rslora: bool
    use_dora: bool


@dataclass
class ModelArguments:
    """The model to train, and which of its weights."""

    topic: ClassVar[str] = "model"

    model_name_or_path: str = flag("", "Model to start from: a folder or a hub name (required).", "model")
    pad_token: str | None = flag(None, "Token to pad with, for a tokenizer that has no pad token.", "token")
    trust_remote_code: bool = flag(
        ModelSettings.trust_remote_code, "Run Python code that comes with the model or its tokenizer; read it first."
    )
    attn_implementation: str = flag(
        ModelSettings.attn_implementation,
        "Attention: 'auto' takes, on CUDA, the first of these that gives the model's own numbers: "
        + "".join(f"'{name}'{entry.note}, " for name, entry in KERNELS.items() if entry.by_auto)
        + "'sdpa' (runs everywhere; on CUDA with a dense mask)."
        + "".join(f" '{name}'{entry.note}." for name, entry in KERNELS.items() if not entry.by_auto),
        "name",
        choices=(AUTO, SDPA, *KERNELS),
        topic="memory",
    )
    rope_scaling: str | None = flag(
        None,
        "Give a model with rotary embeddings FACTOR times its positions, e.g. yarn:4 (or linear:4, by interpolation "
        "alone); the trained model keeps them. --max_seq_len is compared with these.",
        "type:factor",
        topic="length",
    )
    dropout: float | None = flag(
        None,
        "Every dropout rate; 0 also turns off layer drop and the jitter of routers; default: the model's own.",
        "0 <= probability < 1",
    )
    gradient_checkpointing: bool = flag(
        False, "Recompute activations in the backward pass: less memory, more time.", topic="memory"
    )
    head_chunk_mb: int = flag(
        0,
        "MiB of float32 logits that the output layer computes at a time; more is faster on a GPU and takes more "
        "memory. 0: by the memory that is free as the run starts, 256 on a CPU. Sums are rounded by it: a resumed run "
        "keeps it.",
        "mib >= 0",
        topic="memory",
    )
    lora_dim: int = flag(0, "Rank of LoRA adapters; 0 trains all weights instead.", "rank >= 0", topic="lora")
    lora_alpha: float = flag(16.0, "LoRA's scale is alpha / rank.", "number", topic="lora")
    use_rslora: bool = flag(
        False,
        "LoRA's scale is alpha / sqrt(rank), which higher ranks need to learn as fast (rsLoRA, Kalajdzievski 2023).",
        topic="lora",
    )
    use_dora: bool = flag(
        ModelSettings.use_dora,
        "Adapters of weights' directions, with a trained magnitude for each output of a layer beside (DoRA, Liu et al. "
        "2024); slower than LoRA.",
        topic="lora",
    )
    lora_dropout: float = flag(0.0, "Dropout before the adapters.", "0 <= probability < 1", topic="lora")
    lora_module_name: str = flag(
        "all-linear",
        "'all-linear', or parts of the names of the linear layers that get adapters, separated by commas; q_proj$ is "
        "the end of a name.",
        "names",
        topic="lora",
    )
    only_optimize_lora: bool = flag(
        True, "With LoRA: freeze all other weights (a new scalar head still trains).", topic="lora"
    )
    freeze_vision_tower: bool = flag(
        ModelSettings.freeze_vision_tower,
        "Models of images and text: do not train the vision tower, apart from its projector.",
    )
    freeze_projector: bool = flag(
        ModelSettings.freeze_projector,
        "Models of images and text: do not train the projector, which makes embeddings of the tower's states.",
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Note every mistake in these settings."""
        mistakes.require(
            bool(self.model_name_or_path),
            "--model_name_or_path expects the folder or hub name of a model, got nothing; "
            "`threestep new-model --out DIR` makes one with random weights",
        )
        check_scaling(mistakes, self.rope_scaling)
        check_kinds(mistakes, self, self.lora_dim)

    def settings(self, added: AddedFlags = NO_FLAGS) -> ModelSettings:
        """added: flags of plugins, which may change the model."""
        own: dict[str, Any] = {"name_or_path": self.model_name_or_path, "preparers": preparers_of(added)}
        own["lora_alpha"] = scaled_alpha(self.lora_alpha, self.lora_dim, self.use_rslora)
        return settings_of(ModelSettings, self, **own, defaults=("trains_adapter_on", "new_head", "takes_media"))


def with_flag(argv: Sequence[str]) -> list[str]:
    """Give the words before the first flag, which are models, their flag."""
    return ["--model_name_or_path", *argv] if argv and not argv[0].startswith("-") else list(argv)


def scaled_alpha(alpha: float, dim: int, is_by_root: bool) -> float:
    """Return the alpha whose alpha / rank is the scale. is_by_root: that of rsLoRA, alpha / sqrt(rank)."""
    return alpha * math.sqrt(dim) if is_by_root else alpha


def check_kinds(mistakes: Mistakes, flags: AdapterFlags, *dims: int) -> None:
    """Note kinds of adapters where there are none. dims: ranks of the models' adapters."""
    for flag_name, does, is_given in (
        ("--use_rslora", "scales LoRA's adapters", flags.use_rslora),
        ("--use_dora", "adds magnitudes to LoRA's adapters", flags.use_dora),
    ):
        mistakes.require(
            not is_given or any(dims),
            f"{flag_name} {does}, and there are none; give --lora_dim, in step 3 --actor_lora_dim, or leave it out",
        )
