"""A divergence at the student's output layer, chunk by chunk: all its logits are never in memory, nor the teacher's.

Each chunk's gradient is computed with its divergence, as in Liger Kernel's losses (Hsu et al. 2024, arXiv:2410.10989):
the backward only scales it, so that the teacher is read once.

M tokens to be predicted, U different ones of these, C of a chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from training.utils.models.token_model import TargetHead, at_least_float32, plus_product

if TYPE_CHECKING:
    from training.utils.contracts.token_rows import TokenRows

# Numbers per logit of a chunk that are in memory at once: both models' logits, log-probabilities, their terms.
NUMBERS_PER_LOGIT = 8

# Given a chunk's logits [C, V] and its place among the U, returns [C] divergences, with a graph, and [C] teacher's
# probability of the tokens that are compared one by one.
CompareChunk = Callable[[torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor]]


class HeadComparison(NamedTuple):
    """Sums over the M tokens of a micro-batch. total: of the divergences, a scalar with a gradient. covered: of the
    teacher's probabilities of the tokens that are compared one by one, without."""

    total: torch.Tensor
    covered: torch.Tensor


def compared_at_head(
    hidden_UH: torch.Tensor, head: TargetHead, copies_U: torch.Tensor, compare: CompareChunk, *, rows: int
) -> HeadComparison:
    """Return the sums over tokens, each as often as `copies_U` says. head: whole. rows: of a chunk."""
    return HeadComparison(*_HeadDivergence.apply(hidden_UH, head.weight, head.bias, copies_U, compare, rows))


def rows_of_chunk(chunk_bytes: int, vocabulary: int) -> int:
    """Return the tokens of a chunk whose numbers take `chunk_bytes`."""
    return max(1, chunk_bytes // (4 * NUMBERS_PER_LOGIT * vocabulary))


def copies_of(rows: TokenRows) -> torch.Tensor:
    """Return int64 [U]: how many sequences have each of the different targets."""
    _, predictor_U, read_M = rows.reads()
    if read_M is None:
        return torch.ones_like(predictor_U)
    return torch.bincount(read_M, minlength=len(predictor_U))


class _HeadDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_UH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        copies_U: torch.Tensor,
        compare: CompareChunk,
        rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        learns = any(ctx.needs_input_grad[:3])
        number = at_least_float32(hidden_UH.dtype)
        total, covered = hidden_UH.new_zeros((), dtype=number), hidden_UH.new_zeros((), dtype=number)
        grad_hidden_UH = torch.zeros_like(hidden_UH) if ctx.needs_input_grad[0] else None
        grad_weight_VH = grad_bias_V = None
        for begin in range(0, len(hidden_UH), rows):
            here = slice(begin, begin + rows)
            logits_CV = functional.linear(hidden_UH[here], weight_VH, bias_V).to(number)
            copies_C = copies_U[here].to(number)
            with torch.set_grad_enabled(learns):
                divergence_C, covered_C = compare(logits_CV.requires_grad_(learns), here)
            total += (divergence_C.detach() * copies_C).sum()
            covered += (covered_C.detach() * copies_C).sum()
            if not learns:
                continue
            [grad_CV] = torch.autograd.grad(divergence_C, logits_CV, copies_C)
            if ctx.needs_input_grad[2]:
                part_V = grad_CV.sum(dim=0)
                grad_bias_V = part_V if grad_bias_V is None else grad_bias_V.add_(part_V)
            grad_CV = grad_CV.to(hidden_UH.dtype)
            if grad_hidden_UH is not None:
                grad_hidden_UH[here] = grad_CV @ weight_VH
            if ctx.needs_input_grad[1]:
                grad_weight_VH = plus_product(grad_weight_VH, grad_CV.t(), hidden_UH[here])
        ctx.gradients = (
            grad_hidden_UH,
            None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype),
            None if grad_bias_V is None or bias_V is None else grad_bias_V.to(bias_V.dtype),
        )
        ctx.mark_non_differentiable(covered)
        return total, covered

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # one backward, after which nothing holds them
        scaled = [None if part is None else part * grads[0].to(part.dtype) for part in gradients]
        return *scaled, None, None, None
