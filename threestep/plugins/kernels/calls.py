"""A model's attention calls, from which a kernel decides whether it supports the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from training.utils.models.attention import set_text_attention, text_attention
from training.utils.models.own_forward import make_probes
from training.utils.models.weights import whole_where_used

# Arguments of transformers' attention functions that change the scores (transformers 5.19).
CHANGES_SCORES = ("position_bias", "s_aux", "softcap", "indices", "block_indices", "head_mask")
_NOTING = "noted_attention"


@dataclass(frozen=True)
class AttentionCall:
    """A model's calls of its attention.

    head_sizes: of keys and of values, the largest and the smallest of all layers; 0 if none uses transformers'
        interface.
    dropout: the largest, in train mode.
    changes: those of CHANGES_SCORES that it is given.
    """

    head_sizes: tuple[int, int]
    dropout: float
    changes: tuple[str, ...]


def call_of(model: PreTrainedModel, dropout: float | None) -> AttentionCall:
    """Return a model's calls of its attention: read from a short sequence, or for a model on the meta device from its
    configuration. dropout: the rate that will be set, None for the model's own"""
    if model.device.type == "meta":
        return _by_configuration(model, dropout)
    call = _noted(model)
    return call if dropout is None else AttentionCall(call.head_sizes, dropout, call.changes)


def _by_configuration(model: PreTrainedModel, dropout: float | None) -> AttentionCall:
    config = model.config.get_text_config()
    size = heads_of(model)[2]
    rate = float(getattr(config, "attention_dropout", None) or 0.0) if dropout is None else dropout
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return AttentionCall((size, size), rate, ("softcap",) if capped else ())


def _noted(model: PreTrainedModel) -> AttentionCall:
    """Read a short sequence in train mode, and note what attention is called with. torch's random state is left
    alone."""
    calls: list[tuple[int, int, float]] = []
    changes: set[str] = set()

    def noting(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **others: Any
    ) -> tuple[torch.Tensor, None]:
        calls.append((key.shape[-1], value.shape[-1], float(others.get("dropout") or 0.0)))
        changes.update(name for name in CHANGES_SCORES if others.get(name) is not None)
        return sdpa_attention_forward(module, query, key, value, mask, **others)

    loaded, was_training = text_attention(model), model.training
    AttentionInterface.register(_NOTING, noting)
    AttentionMaskInterface.register(_NOTING, sdpa_mask)
    set_text_attention(model, _NOTING)
    model.train()
    ids_T = make_probes(model.config, 0).alone[0].segments[0].tokens.input_ids
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices), whole_where_used(model):
            model(input_ids=ids_T.unsqueeze(0).to(model.device), use_cache=False)
    finally:
        model.train(was_training)
        set_text_attention(model, loaded)
    sizes = [size for call in calls for size in call[:2]] or [0]
    rate = max([call[2] for call in calls], default=0.0)
    return AttentionCall((max(sizes), min(sizes)), rate, tuple(name for name in CHANGES_SCORES if name in changes))


def heads_of(model: PreTrainedModel) -> tuple[int, int, int]:
    """Return heads, key-value heads and head size by a transformers model's configuration."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, size
