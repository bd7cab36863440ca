"""Losses on pairs of responses. Pure: tensors in, tensors out. Cheap to import.

B sequences (a prompt with one response each), Q pairs of sequences with the same prompt.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from training.step2_dpo.losses.pairs import Objective, Responses, best_likelihood
from training.utils.flags.added import with_added
from training.utils.plugins.objectives import PreferenceLoss
from training.utils.preference.arguments import PairLossArguments

if TYPE_CHECKING:
    import torch


def smoothed(rewards_Q: torch.Tensor, flipped: float) -> torch.Tensor:
    """Return [Q], the cross-entropy of the preference sigmoid(reward) against a label that is wrong with probability
    `flipped` (Mitchell 2023, conservative DPO, equation 3). rewards_Q: of the better response minus the worse."""
    from torch.nn.functional import logsigmoid

    return -(1.0 - flipped) * logsigmoid(rewards_Q) - flipped * logsigmoid(-rewards_Q)


def sigmoid(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """DPO (Rafailov et al. 2023, equation 7); smoothed as Mitchell 2023 (conservative DPO), equation 3."""
    return smoothed(objective.beta * margins_Q, objective.options.label_smoothing)


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


def sft(responses: Responses, objective: Objective) -> torch.Tensor:
    """Each best response's mean negative log-likelihood a token (Pang et al. 2024, equation 1, the second term)."""
    return best_likelihood(responses)


def _log_two(objective: Objective) -> float:
    return math.log(2.0)


LOSSES = with_added(
    "preference_losses",
    {
        "sigmoid": PreferenceLoss(
            "is DPO (Rafailov et al. 2023)", sigmoid, PairLossArguments, loss_of_equal_pairs=_log_two
        ),
        "ipo": PreferenceLoss(
            "is the squared loss on log-probabilities per token (Azar et al. 2023)", ipo, is_token_mean=True
        ),
        "hinge": PreferenceLoss("is SLiC's (Zhao et al. 2023)", hinge),
        "sft": PreferenceLoss(
            "is the best response's negative log-likelihood per token, for sums",
            of_responses=sft,
            needs_reference=False,
        ),
    },
    PreferenceLoss,
)
