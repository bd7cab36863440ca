"""The most that rounding alone may move scores, log-probabilities and their KL divergence. Pure tensors.

B sequences, R response tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from training.step3_ppo.kl import KlEstimator

# What a model's numbers of one text in packed and in padded rows differ by: units in the last place of the model's
# dtype, in which states are stored, and of float32, in which products are summed; of a score as a share of it, of a
# log-probability as a share of 1 + its size. Measured on Llama, GPT-2 and OPT of random weights. 720 scores each: in
# float32 1.5 units as a median and 31 at most; in bfloat16 the median is 0.1 and one in a hundred differs by 3 to 4,
# where more of these would be differences that a model means. 8,877 log-probabilities each: in float32 at most 10, and
# 38 with logits four times as wide; in bfloat16 at most 1.4 and 9.
_STORED_UNITS, _SUMMED_UNITS = 2, 32
_EVALUATED_UNITS = 2  # of float32 at 1, of an estimator: exp(d) - d - 1 where d is 0


def share(dtype: torch.dtype) -> float:
    """Return the most that rounding may move the output of a model of this dtype, as a share of it."""
    return _STORED_UNITS * torch.finfo(dtype).eps + _SUMMED_UNITS * torch.finfo(torch.float32).eps


def of_logprobs(logprobs_BR: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [B, R], in nats."""
    return share(dtype) * (1.0 + logprobs_BR.abs())


def of_kl(
    estimator: KlEstimator,
    logprobs_BR: torch.Tensor,
    ref_logprobs_BR: torch.Tensor,
    kl_BR: torch.Tensor,
    *,
    nats_BR: torch.Tensor,
) -> torch.Tensor:
    """Return [B, R], how far the KL of a token moves where its log-probability moves by `nats_BR` to either side. The
    exact KL of two near distributions is d^2 / 2 of some d, and moves as that."""
    evaluated = _EVALUATED_UNITS * torch.finfo(torch.float32).eps
    if estimator.of_logits:
        return ((2.0 * kl_BR.clamp(min=0.0)).sqrt() + 0.5 * nats_BR) * nats_BR + evaluated
    moved = [estimator.estimate(logprobs_BR + way * nats_BR, ref_logprobs_BR) - kl_BR for way in (-1.0, 1.0)]
    return torch.maximum(moved[0].abs(), moved[1].abs()) + evaluated
