"""Drawing one token a row. Pure tensors.

A rows, V vocabulary.
"""

from __future__ import annotations

import torch

from training.step3_ppo.rollout.base import Sampling


def draw(logits_AV: torch.Tensor, uniform_A: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (token_A int64, logprob_A float32) for float32 logits and one uniform number in [0, 1) a row.

    Temperature, then top-k, then top-p; the token is where the cumulative probability passes the uniform number.
    The log-probability is of the tempered distribution before top-k and top-p: what the training forward computes.
    Temperature 0 takes the likeliest token, with its log-probability at temperature 1.
    """
    if sampling.temperature == 0.0:
        token_A = logits_AV.argmax(dim=-1)
    else:
        logits_AV = logits_AV / sampling.temperature
        kept_AV = keep_top_p(keep_top_k(logits_AV, sampling.top_k), sampling.top_p)
        cumulative_AV = torch.softmax(kept_AV.double(), dim=-1).cumsum(dim=-1)
        # Scaled by the last sum, which rounding leaves beside 1, so that the bound is always inside the vocabulary.
        bound_A1 = (uniform_A.double() * cumulative_AV[:, -1]).unsqueeze(1)
        token_A = torch.searchsorted(cumulative_AV, bound_A1, right=True).squeeze(1)
    logprob_A = torch.log_softmax(logits_AV, dim=-1).gather(-1, token_A.unsqueeze(1)).squeeze(1)
    return token_A, logprob_A


def keep_top_k(logits_AV: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return logits with everything below the k-th largest at -inf; 0 keeps all."""
    if top_k == 0 or top_k >= logits_AV.shape[-1]:
        return logits_AV
    threshold_A1 = torch.topk(logits_AV, top_k, dim=-1).values[:, -1:]
    return logits_AV.masked_fill(logits_AV < threshold_A1, float("-inf"))


def keep_top_p(logits_AV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return logits with all but the smallest set of likeliest tokens that reaches `top_p` at -inf; 1 keeps all.

    Holtzman et al. 2020, nucleus sampling.
    """
    if top_p >= 1.0:
        return logits_AV
    sorted_AV, order_AV = torch.sort(logits_AV, dim=-1, descending=True)
    probabilities_AV = torch.softmax(sorted_AV, dim=-1)
    before_AV = probabilities_AV.cumsum(dim=-1) - probabilities_AV  # mass of the likelier tokens
    dropped_AV = torch.zeros_like(before_AV, dtype=torch.bool).scatter(-1, order_AV, before_AV >= top_p)
    return logits_AV.masked_fill(dropped_AV, float("-inf"))
