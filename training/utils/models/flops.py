"""How many floating-point operations a training step is worth, and what share of this machine's peak that is (MFU).

Useful work alone is counted: no padding, no attention that a mask throws away, no recomputation by gradient
checkpointing. Model FLOPs utilization is PaLM's measure (Chowdhery et al. 2022, appendix B); here the peak is the
rate of a plain matmul, measured on the machine in the training's own precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from training.utils.layout.documents import Document

# What configurations call the experts that there are, and those that a token visits.
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = "num_experts_per_tok"  # noqa: S105 (a name in a configuration)


@dataclass(frozen=True)
class ModelShape:
    """What a token is multiplied with.

    body_trained, body_frozen: weights in the matrices that every token passes; of experts, those that it visits.
    head_trained, head_frozen: weights of the output layer, which is computed where it is read alone.
    attention_width: query heads x head size, summed over the layers that attend.
    """

    body_trained: float
    body_frozen: float
    head_trained: float
    head_frozen: float
    attention_width: int


def model_shape(model: nn.Module) -> ModelShape:
    """Return the shape of a transformers model (ZeRO-3's too). Embedding tables are looked up, not multiplied: they
    count where the head is tied to one. Vectors (biases, norms) count nothing."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    head = _head(model)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    sums = {(part, trained): 0.0 for part in ("body", "head") for trained in (True, False)}
    for parameter in model.parameters():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))  # ZeRO-3 leaves shards in `shape`
        is_head = head is not None and parameter is head
        if len(shape) >= 2 and (is_head or id(parameter) not in tables):
            part = "head" if is_head else "body"
            sums[part, parameter.requires_grad] += _visited(shape, config)
    return ModelShape(
        body_trained=sums["body", True],
        body_frozen=sums["body", False],
        head_trained=sums["head", True],
        head_frozen=sums["head", False],
        attention_width=_attention_width(config),
    )


def visible_pairs(document: Document) -> int:
    """How many (token, token it sees) pairs attention has to compute: each token sees what its segment sees, the
    tokens before it in its segment, and itself.

    A prompt of 3 tokens with responses of 2 and 1: 3 x 4 / 2 + (2 x 3 + 2 x 3 / 2) + (1 x 3 + 1) = 6 + 9 + 4 = 19.
    """
    lengths = [len(segment.tokens) for segment in document.segments]
    return sum(
        own * sum(lengths[seen] for seen in segment.sees) + own * (own + 1) // 2
        for own, segment in zip(lengths, document.segments, strict=True)
    )


def training_flops(shape: ModelShape, tokens: int, pairs: int, reads: int) -> float:
    """Return the FLOPs of a forward and its backward: `tokens` through the body, `pairs` of attention
    (`visible_pairs`), the head at `reads` positions.

    A weight that a token meets costs 2 FLOPs forward, 2 for the gradient of its input and, where it trains, 2 for its
    own: 6, or 4 where it is frozen. A visible pair costs 2 per unit of width for its score and 2 for its value, and
    twice that backward: 12. A sliding window is counted as full attention, elementwise work not at all.

    By hand: one layer of width 4, two heads of 2 (4 matrices of 16 weights), an MLP of width 8 without a gate (2 of
    32): 128 weights; a head for 10 tokens: 40. A sequence of 3 tokens of which 1 is predicted:
        body 6 x 128 x 3 = 2304, attention 12 x 4 x (1 + 2 + 3) = 288, head 6 x 40 x 1 = 240; together 2832.
    """
    per_token = 6.0 * shape.body_trained + 4.0 * shape.body_frozen
    per_read = 6.0 * shape.head_trained + 4.0 * shape.head_frozen
    return per_token * tokens + per_read * reads + 12.0 * shape.attention_width * pairs


@dataclass(frozen=True)
class ComputeMeter:
    """peak_flops_per_second: of all ranks together."""

    shape: ModelShape
    peak_flops_per_second: float

    def flops(self, documents: Sequence[Document], reads: int) -> float:
        """What training on `documents` once is worth."""
        tokens = sum(document.tokens for document in documents)
        pairs = sum(visible_pairs(document) for document in documents)
        return training_flops(self.shape, tokens, pairs, reads)

    def mfu(self, documents: Sequence[Document], reads: int, seconds: float) -> float:
        """The share of the peak at which `documents`, all that the ranks had, were trained on in `seconds`."""
        return self.flops(documents, reads) / seconds / self.peak_flops_per_second


def _head(model: nn.Module) -> torch.Tensor | None:
    """The weight of the output layer: of a language model, or of a sequence classifier."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    head = head if head is not None else getattr(model, "score", None)
    return getattr(head, "weight", None)


def _visited(shape: tuple[int, ...], config: Any) -> float:
    """The weights of a parameter that one token meets: all, or its share of stacked experts."""
    weights = 1.0
    for size in shape:
        weights *= size
    experts = next((getattr(config, name) for name in _EXPERTS if getattr(config, name, None)), None)
    per_token = getattr(config, _EXPERTS_PER_TOKEN, None)
    is_stack = len(shape) == 3 and experts is not None and shape[0] == experts
    return weights * per_token / experts if is_stack and per_token else weights


def _attention_width(config: Any) -> int:
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return 0
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    layers = sum(kind.endswith("attention") and kind != "linear_attention" for kind in kinds)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return layers * heads * head_size
