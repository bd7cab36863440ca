"""Estimators of the KL divergence to the reference, from log-probabilities of the drawn tokens, and its exact sum over
the vocabulary. Pure tensors.

M tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

# Bounds of k3, verl's: of its exponent, and of its value.
_MOST_DIFFERENCE = 20.0
_MOST_K3 = 10.0
# Below this many nats a difference of log-probabilities may be rounding: float32 rounds those of the same weights, read
# in other rows, apart by 1e-6 to 1e-4.
_ROUNDED_NATS = 1e-3


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return log p - log p_ref for each drawn token: unbiased for KL(p || p_ref), sometimes negative.

    Schulman 2020, "Approximating KL divergence", estimator k1. As a loss it has no effect: its gradient, that of
    log p, is 0 on average whatever the reference is.
    """
    return logprobs - ref_logprobs


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return 1/2 (log p - log p_ref)^2. Schulman 2020, estimator k2: slightly biased; its gradient is the KL's."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return min(exp(d) - d - 1, 10) with d = log p_ref - log p held within +- 20: never negative, and unbiased but for
    the bound.

    Schulman 2020, estimator k3; the KL of GRPO's loss (Shao et al. 2024, equation 4); the bounds are verl's
    (`low_var_kl`). The gradient for log p is 1 - exp(d) where the value is below 10 and 0 beyond, as verl's: a token at
    the bound (d above 2.61 or below -11) costs 10 and pulls nowhere. Without it, one token of d = 20 has a gradient of
    5e8.
    """
    difference = (ref_logprobs - logprobs).clamp(-_MOST_DIFFERENCE, _MOST_DIFFERENCE)
    return (torch.exp(difference) - difference - 1.0).clamp(max=_MOST_K3)


def absolute(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return |log p - log p_ref|: a distance with the same gradient at any size from 1e-3 nats on (`smooth_absolute`),
    not a divergence (verl's `abs`)."""
    return smooth_absolute(logprobs - ref_logprobs)


def smooth_absolute(difference: torch.Tensor) -> torch.Tensor:
    """Return |d|, with its gradient from 1e-3 nats on and (d / 1e-3)^2, of d's sign, below: that of |d| is +1 or -1 by
    rounding alone where two policies are the same. A gradient of d / 1e-3 (Huber 1964) would still give a difference of
    1e-6 a thousandth of a token's weight. Rounding in bf16 is larger, and differences that are meant are as small:
    there the gradient is one of rounding at first (docs/reference/equations.md)."""
    size = difference.abs()
    pull = torch.where(size < _ROUNDED_NATS, size.pow(3) / (3.0 * _ROUNDED_NATS**2), size)
    return size.detach() + (pull - pull.detach())


def k1_pulling(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return the value of k1 with the gradient of k2 (verl's `k1+`)."""
    return _pulling_as_k2(k1(logprobs, ref_logprobs), logprobs, ref_logprobs)


def k3_pulling(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return the value of k3 with the gradient of k2 (verl's `k3+`)."""
    return _pulling_as_k2(k3(logprobs, ref_logprobs), logprobs, ref_logprobs)


def absolute_pulling(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return the value of `absolute` with the gradient of k2 (verl's `abs+`)."""
    return _pulling_as_k2(absolute(logprobs, ref_logprobs), logprobs, ref_logprobs)


def _pulling_as_k2(value: torch.Tensor, logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Return `value` with k2's gradient for log p, log p - log p_ref: on average the KL's, and back to the reference at
    any distance."""
    pull = k2(logprobs, ref_logprobs)
    return value.detach() + (pull - pull.detach())


def full_kl(logits_MV: torch.Tensor, ref_logits_MV: torch.Tensor, chunk_tokens: int = 512) -> torch.Tensor:
    """Return float KL_M = sum over the vocabulary of p (log p - log p_ref), in nats, exact; logits of any scale.

    Computed in chunks of tokens, again in the backward, so that memory holds only their float32 copies besides the
    logits of both models.
    """
    wide = torch.promote_types(logits_MV.dtype, torch.float32)

    def of_chunk(logits_CV: torch.Tensor, ref_logits_CV: torch.Tensor) -> torch.Tensor:
        log_p_CV = logits_CV.to(wide).log_softmax(-1)
        return (log_p_CV.exp() * (log_p_CV - ref_logits_CV.to(wide).log_softmax(-1))).sum(-1)

    parts = [logits_MV.new_zeros(0, dtype=wide)]
    for begin in range(0, len(logits_MV), chunk_tokens):
        here = slice(begin, begin + chunk_tokens)
        parts.append(checkpoint(of_chunk, logits_MV[here], ref_logits_MV[here], use_reentrant=False))
    return torch.cat(parts)
