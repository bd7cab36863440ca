"""Dropout rates of a loaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The names of dropout rates in transformers' model families.
_DROPOUT_NAMES = (
    "dropout", "attention_dropout", "hidden_dropout", "activation_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
)  # fmt: skip


def set_dropout(model: PreTrainedModel, rate: float) -> None:
    """Set every dropout rate, in the configuration and in the modules."""
    import torch

    for name in _DROPOUT_NAMES:
        if hasattr(model.config, name):
            setattr(model.config, name, rate)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = rate
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, rate)
