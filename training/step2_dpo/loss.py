"""The losses of direct preference optimisation. Pure: tensors in, tensors out.

M target tokens, B sequences (a prompt with one response each), Q pairs of sequences with the same prompt, the first
better than the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Objective:
    """The loss and its constants.

    loss_type: "sigmoid", "ipo" or "hinge"
    beta: cost of leaving the reference
    label_smoothing: "sigmoid" only: share of pairs assumed to be ranked the wrong way round
    sft_coef: weight of the best response's likelihood
    """

    loss_type: str
    beta: float
    label_smoothing: float
    sft_coef: float


def log_ratios(
    logprobs_B: torch.Tensor, reference_B: torch.Tensor, tokens_B: torch.Tensor, loss_type: str
) -> torch.Tensor:
    """Return [B], log(policy / reference) of each response; times beta it is the implicit reward (Rafailov et al.
    2023, equation 5, but for a constant of the prompt).

    logprobs_B, reference_B: float32, log-probabilities summed over a response's tokens, tokens_B of them. For "ipo"
    the ratio is a token's mean. Azar et al. 2023 write whole responses, but their target 1 / (2 beta) does not grow
    with a response, so a sum would move long responses less per token; they advised TRL to average
    (huggingface.co/blog/pref-tuning), and beta means the same here as there.
    """
    ratios_B = logprobs_B - reference_B
    return ratios_B / tokens_B if loss_type == "ipo" else ratios_B


def preference_loss(
    ratios_B: torch.Tensor,
    better_Q: torch.Tensor,
    worse_Q: torch.Tensor,
    weight_Q: torch.Tensor,
    prompts_in_step: float,
    objective: Objective,
) -> torch.Tensor:
    """Return this micro-batch's part of the step's loss, a scalar.

    ratios_B: of `log_ratios`. better_Q, worse_Q: int64, sequences. weight_Q: each pair's share of its prompt; a
    prompt with K ranked responses has K(K-1)/2 pairs that share a weight of 1, so that all prompts weigh the same.
    prompts_in_step: of the whole optimizer step, on all ranks.
    """
    margins_Q = ratios_B.index_select(0, better_Q) - ratios_B.index_select(0, worse_Q)
    return (_LOSSES[objective.loss_type](margins_Q, objective) * weight_Q).sum() / prompts_in_step


def best_response_loss(
    logprobs_B: torch.Tensor, tokens_B: torch.Tensor, is_best_B: torch.Tensor, prompts_in_step: float
) -> torch.Tensor:
    """Return this micro-batch's part of the best responses' mean negative log-likelihood a token, a scalar (Pang et
    al. 2024, equation 1, the second term). is_best_B: bool, True for the first of each prompt's responses."""
    return -(logprobs_B / tokens_B * is_best_B).sum() / prompts_in_step


def _sigmoid(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Rafailov et al. 2023, equation 7; smoothed as Mitchell 2023 (conservative DPO), equation 3."""
    rewards_Q, flipped = objective.beta * margins_Q, objective.label_smoothing
    return -(1.0 - flipped) * functional.logsigmoid(rewards_Q) - flipped * functional.logsigmoid(-rewards_Q)


def _ipo(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """Azar et al. 2023, equation 17, with beta for their tau."""
    return (margins_Q - 1.0 / (2.0 * objective.beta)).square()


def _hinge(margins_Q: torch.Tensor, objective: Objective) -> torch.Tensor:
    """The hinge of SLiC-HF (Zhao et al. 2023), on log-ratios as in RSO (Liu et al. 2023)."""
    return functional.relu(1.0 - objective.beta * margins_Q)


_LOSSES = {"sigmoid": _sigmoid, "ipo": _ipo, "hinge": _hinge}
