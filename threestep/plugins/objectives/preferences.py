"""Losses on ranked and on marked responses. Pure tensors.

B sequences (a prompt with one response each), Q pairs of sequences with the same prompt.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import logsigmoid

from training.step2_dpo.loss import Objective, Responses, best_likelihood, of_pairs, smoothed

if TYPE_CHECKING:
    from collections.abc import Mapping


def sigmoid_norm(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """DPO's loss where a margin is the difference of two means over tokens: length-normalised DPO (Lambert et al. 2024,
    Tulu 3)."""
    return smoothed(objective.beta * margins_Q, objective.options.label_smoothing)


def robust(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Robust DPO (Chowdhury et al. 2024): over labels of which the share `label_smoothing` is flipped, its mean is the
    loss of right ones. It may be below 0."""
    rewards_Q, flipped = objective.beta * margins_Q, objective.options.label_smoothing
    right_Q, wrong_Q = -logsigmoid(rewards_Q), -logsigmoid(-rewards_Q)
    return ((1.0 - flipped) * right_Q - flipped * wrong_Q) / (1.0 - 2.0 * flipped)


def apo_zero(responses: Responses, objective: Objective) -> torch.Tensor:
    """APO-zero (D'Oosterlinck et al. 2024, equation 7): chosen responses become likelier, rejected ones less likely;
    for models whose own responses are worse than the chosen ones."""
    return of_pairs(
        responses,
        lambda better_Q, worse_Q: 1.0 - (objective.beta * better_Q).sigmoid() + (objective.beta * worse_Q).sigmoid(),
    )


def apo_down(responses: Responses, objective: Objective) -> torch.Tensor:
    """APO-down (D'Oosterlinck et al. 2024, equation 8): both responses become less likely, rejected ones more so; for
    models whose own responses are better than the chosen ones."""
    beta = objective.beta
    return of_pairs(
        responses,
        lambda better_Q, worse_Q: (beta * better_Q).sigmoid() + 1.0 - (beta * (better_Q - worse_Q)).sigmoid(),
    )


def plackett_luce(responses: Responses, objective: Objective) -> torch.Tensor:
    """DPO on the whole ranking of K responses (Rafailov et al. 2023, appendix A.3): the sum over all but the last
    response of -log(exp(beta r_k) / sum over j from k on of exp(beta r_j)), that is of log(1 + sum over worse j of
    exp(beta (r_j - r_k))). Of two responses it is DPO. A prompt's K - 1 terms are added up, and have no other weight.
    """
    ratios_B, better_Q = responses.ratios_B, responses.better_Q
    gaps_Q = objective.beta * (ratios_B.index_select(0, responses.worse_Q) - ratios_B.index_select(0, better_Q))
    # log(1 + the sum) from the largest term, the 1 among them: nothing overflows.
    most_B = torch.zeros_like(ratios_B).scatter_reduce(0, better_Q, gaps_Q.detach(), "amax")
    sums_B = (-most_B).exp().index_add(0, better_Q, (gaps_Q - most_B.index_select(0, better_Q)).exp())
    return (most_B + sums_B.log()).sum()  # 0 of responses that are better than none


def orpo(responses: Responses, objective: Objective) -> torch.Tensor:
    """ORPO (Hong et al. 2024), equations 6 and 7, with beta for their lambda: the best response's negative
    log-likelihood, and -log sigmoid of the log of the odds ratio. Their P(y|x) is the geometric mean of its tokens'
    (equation 3)."""
    ratio = of_pairs(responses, lambda better_Q, worse_Q: -logsigmoid(log_odds(better_Q) - log_odds(worse_Q)))
    return best_likelihood(responses) + objective.beta * ratio


def log_odds(logprobs: torch.Tensor) -> torch.Tensor:
    """Return log(P / (1 - P)) of log-probabilities (Hong et al. 2024, equation 4). Where P rounds to 1, it is that of
    the next smaller number, and has no gradient."""
    below_one = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    # log(1 - exp(x)) is exact to rounding by one of two forms, either side of P = 1/2 (Maechler 2012).
    log_rest = torch.where(
        below_one > -math.log(2.0), (-torch.expm1(below_one)).log(), torch.log1p(-torch.exp(below_one))
    )
    return below_one - log_rest


def simpo(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """SimPO (Meng et al. 2024, equation 6). A margin is the difference of two mean log-probabilities a token."""
    rewards_Q = objective.beta * margins_Q - objective.options.simpo_gamma
    return smoothed(rewards_Q, objective.options.label_smoothing)


def cpo(responses: Responses, objective: Objective) -> torch.Tensor:
    """CPO (Xu et al. 2024): DPO's loss under a uniform reference (their equation 3), and the likelihood of the best
    response, here a mean over its tokens."""
    beta, options = objective.beta, objective.options
    preference = of_pairs(
        responses, lambda better_Q, worse_Q: smoothed(beta * (better_Q - worse_Q), options.label_smoothing)
    )
    return preference + options.cpo_alpha * best_likelihood(responses)


def kto(responses: Responses, objective: Objective) -> torch.Tensor:
    """KTO (Ethayarajh et al. 2024, equations 7 and 8), without their constant: weight x (1 - sigmoid(beta (r - z))) of
    a good response, weight x (1 - sigmoid(beta (z - r))) of a bad one, where z is `reference_point`."""
    is_good_B, weights = responses.columns["is_good"] > 0, objective.options
    gains_B = objective.beta * (responses.ratios_B - responses.reference_point)
    good_B = weights.desirable_weight * (1.0 - gains_B.sigmoid())
    bad_B = weights.undesirable_weight * (1.0 - (-gains_B).sigmoid())
    return torch.where(is_good_B, good_B, bad_B).sum()


def kto_point_sums(responses: Responses) -> dict[str, float | torch.Tensor]:
    """Sums over responses of other rows."""
    return {"ratios": responses.ratios_B.sum(), "rows": float(responses.ratios_B.numel())}


def kto_point_of(totals: Mapping[str, float]) -> float:
    """Return z, an estimate of KL(policy || reference): the mean over mismatched prompts and responses, at least 0. The
    bound is put on the mean over the whole step: a mean of bounded parts would be larger."""
    return max(totals["ratios"] / max(totals["rows"], 1.0), 0.0)


def bco(responses: Responses, objective: Objective) -> torch.Tensor:
    """BCO (Jung et al. 2024): the cross-entropy of sigmoid(beta r - delta) against the mark, where delta is beta times
    `reference_point`. Their weights of the difference between prompts of good and bad responses (UDM) are left out."""
    signs_B = 2.0 * responses.columns["is_good"] - 1.0
    return -logsigmoid(signs_B * objective.beta * (responses.ratios_B - responses.reference_point)).sum()


def bco_point_sums(responses: Responses) -> dict[str, float | torch.Tensor]:
    """Sums over the good responses and over the bad ones."""
    ratios_B, good_B = responses.ratios_B, responses.columns["is_good"]
    return {
        "good_ratios": (good_B * ratios_B).sum(),
        "good": good_B.sum(),
        "bad_ratios": ((1.0 - good_B) * ratios_B).sum(),
        "bad": (1.0 - good_B).sum(),
    }


def bco_point_of(totals: Mapping[str, float]) -> float:
    """Return half-way between the mean log-ratios of good and bad responses; the one mean where the step has no others.
    The authors take a mean over past steps, which depends on when a run was begun."""
    means = [totals[f"{side}_ratios"] / totals[side] for side in ("good", "bad") if totals[side]]
    return sum(means) / max(len(means), 1)
