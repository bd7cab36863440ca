"""Floating-point operations of a training step, and their share of this machine's peak (MFU).

Only useful work counts: no padding, no masked attention, no recomputation by gradient checkpointing. Model FLOPs
utilization is PaLM's measure (Chowdhery et al. 2022, appendix B); here the peak is the rate of a plain matmul, measured
on the machine in the precision of the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from training.utils.models.families import is_beside_language
from training.utils.models.weights import packed_elements, whole_shape

if TYPE_CHECKING:
    from training.utils.contracts.documents import Document

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # names in configurations of how many there are


@dataclass(frozen=True)
class ModelShape:
    """The weights that a token is multiplied with.

    body_trained, body_frozen: in the matrices that every token passes; of experts, those that it visits.
    head_trained, head_frozen: in the output layer, which is computed only where it is read.
    attention_width: query heads x head size, summed over the layers that attend.
    """

    body_trained: float
    body_frozen: float
    head_trained: float
    head_frozen: float
    attention_width: int


def model_shape(model: nn.Module) -> ModelShape:
    """Return the shape of a transformers model, sharded or not. Embedding tables count only where the head is tied to
    one: they are looked up, not multiplied. Vectors (biases, norms) do not count, nor does what is beside the language
    model, which no token passes."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    head = _head(model)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    sums = dict.fromkeys(("body_trained", "body_frozen", "head_trained", "head_frozen"), 0.0)
    is_beside = is_beside_language(model)
    for name, parameter in model.named_parameters():
        if is_beside(name):
            continue
        shape = whole_shape(parameter)
        is_head = head is not None and parameter is head
        if len(shape) >= 2 and (is_head or id(parameter) not in tables):
            part, state = "head" if is_head else "body", "trained" if parameter.requires_grad else "frozen"
            sums[f"{part}_{state}"] += _visited(shape, config)
    sums["body_frozen"] += packed_elements(model)
    return ModelShape(**sums, attention_width=_attention_width(config))


def visible_pairs(document: Document) -> int:
    """Return how many (token, visible token) pairs attention computes: each token sees what its segment sees, the
    tokens before it in its segment, and itself.

    A prompt of 3 tokens with responses of 2 and 1: 3 x 4 / 2 + (2 x 3 + 2 x 3 / 2) + (1 x 3 + 1) = 6 + 9 + 4 = 19.
    """
    lengths = [len(segment.tokens) for segment in document.segments]
    return sum(
        length * sum(lengths[seen] for seen in segment.sees) + length * (length + 1) // 2
        for length, segment in zip(lengths, document.segments, strict=True)
    )


def training_flops(shape: ModelShape, tokens: int, pairs: int, reads: int) -> float:
    """Return the FLOPs of a forward and its backward: `tokens` through the body, `pairs` of attention
    (`visible_pairs`), the head at `reads` positions.

    For each token, a weight costs 2 FLOPs forward, 2 for the gradient of its input and, if it is trained, 2 for its
    gradient: 6, or 4 if frozen. A visible pair costs 2 per unit of width for its score and 2 for its value, and twice
    that backward: 12. A sliding window counts as full attention; elementwise work does not count.

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
        """Return the FLOPs of training on `documents` once."""
        tokens = sum(document.tokens for document in documents)
        pairs = sum(visible_pairs(document) for document in documents)
        return training_flops(self.shape, tokens, pairs, reads)


def _head(model: nn.Module) -> torch.Tensor | None:
    """Return the weight of the output layer of a language model or a sequence classifier."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    head = head if head is not None else getattr(model, "score", None)
    return getattr(head, "weight", None)


def _visited(shape: torch.Size, config: Any) -> float:
    """Return how many weights of a parameter one token uses: all, or its share of stacked experts."""
    weights = float(shape.numel())
    experts = next((getattr(config, name) for name in _EXPERTS if getattr(config, name, None)), None)
    per_token = getattr(config, "num_experts_per_tok", None)
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
