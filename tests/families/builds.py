"""Model folders of tiny random models, as a user would bring them.

Weights are drawn wide (not transformers' 0.02), so that attention, positions, windows and caps show in the logits.
Buffers are the family's own.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from tests.families.configs import EOS, PAD, VOCABULARY, tiny_config

WIDTH = 0.2  # standard deviation of matrices; vectors (norms, biases) move by a third of it
FIRST_ID, LAST_ID = 3, 55  # ids of the sweep's sequences: text in every family


@dataclass(frozen=True)
class NoTokenizer:
    """All that loading and saving ask of a tokenizer. Every id is text but pad and end."""

    pad_token_id: int = PAD
    eos_token_id: int = EOS

    def __len__(self) -> int:
        return VOCABULARY

    def save_pretrained(self, folder: Path) -> None:
        """Nothing is saved."""


def build(family: str, folder: Path, scalar: bool = False, **changes: Any) -> PreTrainedModel:
    """Write a causal language model (or one with a scalar head) to `folder`; return it in eval mode."""
    auto_class: Any = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    model = auto_class.from_config(tiny_config(family, **changes, **({"num_labels": 1} if scalar else {})))
    draw_weights(model, seed=1 if scalar else 0)
    model.eval()
    model.save_pretrained(folder)
    return model


def draw_weights(model: torch.nn.Module, seed: int) -> None:
    """Draw every weight anew, and the buffers that a checkpoint keeps as biases (of routers)."""
    generator = torch.Generator().manual_seed(seed)
    kept = set(model.state_dict())
    biases = [b for name, b in model.named_buffers() if name in kept and "bias" in name and b.is_floating_point()]
    with torch.no_grad():
        for weight in [*model.parameters(), *biases]:
            drawn = torch.randn(weight.shape, generator=generator) * WIDTH
            weight.copy_(drawn if weight.dim() > 1 else weight.nan_to_num() + drawn / 3)


def quiet() -> None:
    """Silence what libraries say about tiny models."""
    import warnings

    from transformers.utils import logging as transformers_logging

    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
