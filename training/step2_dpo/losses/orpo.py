"""Odds ratio preference optimisation: likelihood and preference in one loss, without a reference."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from training.step2_dpo.losses.pairs import Objective, PreferenceLoss, Responses, best_likelihood, of_pairs

if TYPE_CHECKING:
    import torch


def of_responses(responses: Responses, objective: Objective) -> torch.Tensor:
    """Hong et al. 2024, equations 6 and 7, with beta for their lambda: the best response's negative log-likelihood, and
    -log sigmoid of the log of the odds ratio. Their P(y|x) is the geometric mean of its tokens' (equation 3)."""
    from torch.nn.functional import logsigmoid

    ratio = of_pairs(responses, lambda better_Q, worse_Q: -logsigmoid(log_odds(better_Q) - log_odds(worse_Q)))
    return best_likelihood(responses) + objective.beta * ratio


def log_odds(logprobs: torch.Tensor) -> torch.Tensor:
    """Return log(P / (1 - P)) of log-probabilities (Hong et al. 2024, equation 4). Where P rounds to 1, it is that of
    the next smaller number, and has no gradient."""
    import torch

    below_one = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    # log(1 - exp(x)) is exact to rounding by one of two forms, either side of P = 1/2 (Maechler 2012).
    log_rest = torch.where(
        below_one > -math.log(2.0), (-torch.expm1(below_one)).log(), torch.log1p(-torch.exp(below_one))
    )
    return below_one - log_rest


LOSS = PreferenceLoss(
    "is ORPO, likelihood and odds ratio without a reference, from a model before SFT (Hong et al. 2024)",
    of_responses=of_responses,
    is_token_mean=True,
    needs_reference=False,
)
