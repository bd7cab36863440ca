"""Models of every family that the tests read, small enough to be made on the spot, with random weights.

Weights are drawn wide (not transformers' 0.02), so that attention, positions and softcaps show in the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

VOCABULARY = 64
_LLAMA_LIKE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_LIKE,
    "qwen3": _LLAMA_LIKE,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128},
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 16,  # as OPT-350m: projections around the decoder
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 128,
    },
    # A window of 8 tokens, shorter than the rows of these tests.
    "gemma2": {**_LLAMA_LIKE, "sliding_window": 8, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**_LLAMA_LIKE, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
}
# Families that cannot honour packed rows, and train padded.
PADDED_FAMILIES: dict[str, dict[str, Any]] = {
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},  # ALiBi
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}


def tiny_config(family: str, **changes: Any) -> Any:
    """A configuration of `family` without dropout."""
    own = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": VOCABULARY}
    if family == "bloom":
        own |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    if family in ("gpt2", "opt"):
        own |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "gpt2" else {"dropout": 0.0}
    return AutoConfig.for_model(family, **{**own, **{**FAMILIES, **PADDED_FAMILIES}[family], **changes})


def tiny_causal_lm(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A causal language model in eval mode."""
    return _made(AutoModelForCausalLM, tiny_config(family, **changes), dtype, seed)


def tiny_scalar_model(
    family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A sequence-classification model with one label, in eval mode."""
    return _made(AutoModelForSequenceClassification, tiny_config(family, **{"num_labels": 1, **changes}), dtype, seed)


def _made(auto_class: Any, config: Any, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    model = auto_class.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            wide = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
            parameter.copy_(wide if parameter.dim() > 1 else parameter + 0.3 * wide)
    return model.eval()
