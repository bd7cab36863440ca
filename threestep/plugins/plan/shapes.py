"""Shapes of public models by name, as their config.json has them: what a plan needs of a model without its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from training.utils.base.errors import ThreestepError, nearest_names

if TYPE_CHECKING:
    from pathlib import Path


class PublicShape(NamedTuple):
    """hub: the repository whose config.json has these numbers. tied: the output layer is the embedding."""

    hub: str
    family: str
    width: int
    inner: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    positions: int
    tied: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """The keys of a config.json that decide sizes."""
        return {
            "model_type": self.family,
            "architectures": ["Qwen2ForCausalLM" if self.family == "qwen2" else "LlamaForCausalLM"],
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.positions,
            "tie_word_embeddings": self.tied,
        }


# Layers, heads and widths: table 1 of Qwen2.5 (Qwen Team 2024, arXiv 2412.15115), table 3 of Llama 3 (Dubey et al.
# 2024, arXiv 2407.21783), Llama 2 (Touvron et al. 2023, arXiv 2307.09288). Inner widths and padded vocabularies are the
# repositories', as remembered; a test compares the weights that follow with the published number.
SHAPES = {
    "0.5B": PublicShape("Qwen/Qwen2.5-0.5B", "qwen2", 896, 4864, 24, 14, 2, 151936, 32768, True),
    "1.5B": PublicShape("Qwen/Qwen2.5-1.5B", "qwen2", 1536, 8960, 28, 12, 2, 151936, 131072, True),
    "7B": PublicShape("Qwen/Qwen2.5-7B", "qwen2", 3584, 18944, 28, 28, 4, 152064, 131072),
    "8B": PublicShape("meta-llama/Llama-3.1-8B", "llama", 4096, 14336, 32, 32, 8, 128256, 131072),
    "13B": PublicShape("meta-llama/Llama-2-13b-hf", "llama", 5120, 13824, 40, 40, 40, 32000, 4096),
    "32B": PublicShape("Qwen/Qwen2.5-32B", "qwen2", 5120, 27648, 64, 40, 8, 152064, 131072),
    "70B": PublicShape("meta-llama/Llama-3.1-70B", "llama", 8192, 28672, 80, 64, 8, 128256, 131072),
    "405B": PublicShape("meta-llama/Llama-3.1-405B", "llama", 16384, 53248, 126, 128, 8, 128256, 131072),
}


def shape_of(name: str) -> PublicShape | None:
    """The shape of a name in any case; None for a path. ThreestepError for a name that is none."""
    found = {known.lower(): shape for known, shape in SHAPES.items()}.get(name.lower())
    if found is None and not name.startswith((".", "/", "~")) and "/" not in name and not Path(name).is_dir():
        raise ThreestepError(
            f"--model_name_or_path expects a folder with a config.json or one of {', '.join(SHAPES)}, got '{name}'"
            f"{nearest_names(name, SHAPES)}"
        )
    return found


def write_shape(shape: PublicShape, folder: Path) -> None:
    """Write a folder that dry runs take for a model: a configuration without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config, indent=2) + "\n", encoding="utf-8")
