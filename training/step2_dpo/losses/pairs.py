"""The loss of a batch of pairs, and what the table has for each kind of it. Pure: tensors in, tensors out. Cheap to
import: `--help` reaches this module.

M target tokens, B sequences (a prompt with one response each), Q pairs of sequences with the same prompt, the first
better than the second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PreferenceLoss:
    """An entry of the table.

    note: on it, for `--help`.
    of_margins: (margins_Q, objective) -> loss_Q. A margin is the difference of a pair's log-ratios.
    flags: a dataclass of the flags that it has for itself, if any.
    is_token_mean: a response's log-ratio is averaged over its tokens.
    needs_reference: without one log-ratios are log-probabilities, and no reference is read.
    loss_of_equal_pairs: in nats, that of a model to which the responses of a pair are alike, of losses whose rise to it
        shows that nothing is learned.
    """

    note: str
    of_margins: Callable[[torch.Tensor, Objective], torch.Tensor]
    flags: type | None = None
    is_token_mean: bool = False
    needs_reference: bool = True
    loss_of_equal_pairs: Callable[[Objective], float] | None = None


@dataclass(frozen=True)
class Objective:
    """The loss and its constants.

    beta: cost of leaving the reference
    sft_coef: weight of the best response's likelihood
    options: the values of `loss.flags`
    """

    loss: PreferenceLoss
    beta: float
    sft_coef: float = 0.0
    options: Any = None


def log_ratios(
    logprobs_B: torch.Tensor, reference_B: torch.Tensor, tokens_B: torch.Tensor, loss: PreferenceLoss
) -> torch.Tensor:
    """Return [B], log(policy / reference) of each response; times beta it is the implicit reward (Rafailov et al.
    2023, equation 5, but for a constant of the prompt).

    logprobs_B, reference_B: float32, log-probabilities summed over a response's tokens, tokens_B of them.
    """
    ratios_B = logprobs_B - reference_B
    return ratios_B / tokens_B if loss.is_token_mean else ratios_B


def preference_loss(
    ratios_B: torch.Tensor,
    better_Q: torch.Tensor,
    worse_Q: torch.Tensor,
    weight_Q: torch.Tensor,
    *,
    prompts_in_step: float,
    objective: Objective,
) -> torch.Tensor:
    """Return this micro-batch's part of the step's loss, a scalar.

    ratios_B: of `log_ratios`. better_Q, worse_Q: int64, sequences. weight_Q: each pair's share of its prompt; a
    prompt with K ranked responses has K(K-1)/2 pairs that share a weight of 1, so that all prompts weigh the same.
    prompts_in_step: of the whole optimizer step, on all ranks.
    """
    margins_Q = ratios_B.index_select(0, better_Q) - ratios_B.index_select(0, worse_Q)
    return (objective.loss.of_margins(margins_Q, objective) * weight_Q).sum() / prompts_in_step


def best_response_loss(
    logprobs_B: torch.Tensor, tokens_B: torch.Tensor, is_best_B: torch.Tensor, prompts_in_step: float
) -> torch.Tensor:
    """Return this micro-batch's part of the best responses' mean negative log-likelihood a token, a scalar (Pang et
    al. 2024, equation 1, the second term). is_best_B: bool, True for the first of each prompt's responses."""
    return -(logprobs_B / tokens_B * is_best_B).sum() / prompts_in_step
