"""Losses on ranked responses: pairs, or K responses in order. Pure: tensors in, tensors out. Cheap to import.

B sequences (a prompt with one response each), Q pairs of sequences with the same prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.step2_dpo.losses.pairs import Objective, PreferenceLoss, Responses, best_likelihood, of_pairs
from training.utils.flags.flags import flag, flag_of
from training.utils.preference.arguments import PairLossArguments

if TYPE_CHECKING:
    import torch


@dataclass
class SmoothingArguments:
    """Flags of losses with label smoothing."""

    label_smoothing: float = flag_of(
        PairLossArguments,
        "'sigmoid', 'sigmoid_norm', 'cpo', 'simpo' (as in conservative DPO) and 'robust': share of pairs assumed to be "
        "ranked the wrong way round.",
    )


def smoothed(rewards_Q: torch.Tensor, flipped: float) -> torch.Tensor:
    """Return [Q], the cross-entropy of the preference sigmoid(reward) against a label that is wrong with probability
    `flipped` (Mitchell 2023, conservative DPO, equation 3). rewards_Q: of the better response minus the worse."""
    from torch.nn.functional import logsigmoid

    return -(1.0 - flipped) * logsigmoid(rewards_Q) - flipped * logsigmoid(-rewards_Q)


def sigmoid(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """DPO (Rafailov et al. 2023, equation 7); smoothed as Mitchell 2023 (conservative DPO), equation 3."""
    return smoothed(objective.beta * margins_Q, objective.options.label_smoothing)


def sigmoid_norm(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """DPO's loss where a margin is the difference of two means over tokens: length-normalised DPO (Lambert et al. 2024,
    Tulu 3)."""
    return smoothed(objective.beta * margins_Q, objective.options.label_smoothing)


def robust(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Robust DPO (Chowdhury et al. 2024): over labels of which the share `label_smoothing` is flipped, its mean is the
    loss of right ones. It may be below 0."""
    from torch.nn.functional import logsigmoid

    rewards_Q, flipped = objective.beta * margins_Q, objective.options.label_smoothing
    right_Q, wrong_Q = -logsigmoid(rewards_Q), -logsigmoid(-rewards_Q)
    return ((1.0 - flipped) * right_Q - flipped * wrong_Q) / (1.0 - 2.0 * flipped)


def ipo(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """IPO (Azar et al. 2023, equation 17), with beta for their tau.

    Azar et al. write whole responses, but their target 1 / (2 beta) does not grow with a response, so a sum would move
    long responses less per token; they advised TRL to average (huggingface.co/blog/pref-tuning), and beta means the
    same here as there: `is_token_mean`.
    """
    return (margins_Q - 1.0 / (2.0 * objective.beta)).square()


def hinge(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """The hinge of SLiC-HF (Zhao et al. 2023), on log-ratios as in RSO (Liu et al. 2023)."""
    return (1.0 - objective.beta * margins_Q).relu()


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
    import torch

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


@dataclass
class SimpoArguments(SmoothingArguments):
    """Flags of `simpo`."""

    simpo_gamma: float = flag(
        0.5, "'simpo' only: margin by which beta times the difference of log-probabilities is to exceed 0.", "nats >= 0"
    )


def simpo(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """SimPO (Meng et al. 2024, equation 6). A margin is the difference of two mean log-probabilities a token."""
    rewards_Q = objective.beta * margins_Q - objective.options.simpo_gamma
    return smoothed(rewards_Q, objective.options.label_smoothing)


def _simpo_of_equal_pairs(objective: Objective) -> float:
    gamma, flipped = objective.options.simpo_gamma, objective.options.label_smoothing
    return (1.0 - flipped) * math.log1p(math.exp(gamma)) + flipped * math.log1p(math.exp(-gamma))


@dataclass
class CpoArguments(SmoothingArguments):
    """Flags of `cpo`."""

    cpo_alpha: float = flag(
        1.0, "'cpo' only: weight of the best response's negative log-likelihood per token.", "factor >= 0"
    )


def cpo(responses: Responses, objective: Objective) -> torch.Tensor:
    """CPO (Xu et al. 2024): DPO's loss under a uniform reference (their equation 3), and the likelihood of the best
    response, here a mean over its tokens."""
    beta, options = objective.beta, objective.options
    preference = of_pairs(
        responses, lambda better_Q, worse_Q: smoothed(beta * (better_Q - worse_Q), options.label_smoothing)
    )
    return preference + options.cpo_alpha * best_likelihood(responses)


def sft(responses: Responses, objective: Objective) -> torch.Tensor:
    """Each best response's mean negative log-likelihood a token (Pang et al. 2024, equation 1, the second term)."""
    return best_likelihood(responses)


def _log_two(objective: Objective) -> float:
    return math.log(2.0)


def _one(objective: Objective) -> float:
    return 1.0


RANKED = {
    "sigmoid": PreferenceLoss(
        "is DPO (Rafailov et al. 2023)",
        sigmoid,
        SmoothingArguments,
        loss_of_equal_pairs=_log_two,
    ),
    "sigmoid_norm": PreferenceLoss(
        "is DPO on log-ratios per token (Lambert et al. 2024)",
        sigmoid_norm,
        SmoothingArguments,
        is_token_mean=True,
        loss_of_equal_pairs=_log_two,
    ),
    "robust": PreferenceLoss(
        "is DPO's, unbiased if the share --label_smoothing of pairs is wrong (Chowdhury et al. 2024)",
        robust,
        SmoothingArguments,
        loss_of_equal_pairs=_log_two,
    ),
    "ipo": PreferenceLoss(
        "is the squared loss on log-probabilities per token (Azar et al. 2023)", ipo, is_token_mean=True
    ),
    "hinge": PreferenceLoss("is SLiC's (Zhao et al. 2023)", hinge),
    "apo_zero": PreferenceLoss(
        "is APO-zero (D'Oosterlinck et al. 2024)",
        of_responses=apo_zero,
        loss_of_equal_pairs=_one,
    ),
    "apo_down": PreferenceLoss("is APO-down (D'Oosterlinck et al. 2024)", of_responses=apo_down),
    "plackett_luce": PreferenceLoss(
        "is DPO on the whole ranking of K responses (Plackett-Luce; Rafailov et al. 2023, app. A.3)",
        of_responses=plackett_luce,
    ),
    "orpo": PreferenceLoss(
        "is ORPO, likelihood and odds ratio without a reference, from a model before SFT (Hong et al. 2024)",
        of_responses=orpo,
        is_token_mean=True,
        needs_reference=False,
    ),
    "simpo": PreferenceLoss(
        "is SimPO, on log-probabilities per token without a reference; take --beta 2 to 10 (Meng et al. 2024)",
        simpo,
        SimpoArguments,
        is_token_mean=True,
        needs_reference=False,
        loss_of_equal_pairs=_simpo_of_equal_pairs,
    ),
    "cpo": PreferenceLoss(
        "is CPO, without a reference (Xu et al. 2024)",
        flags=CpoArguments,
        of_responses=cpo,
        needs_reference=False,
    ),
    "sft": PreferenceLoss(
        "is the best response's negative log-likelihood per token, for sums",
        of_responses=sft,
        needs_reference=False,
    ),
}
