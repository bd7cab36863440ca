"""The preference losses of a batch of responses, the table of their names, their weighted sum, and beta at each
step. Pure: tensors in, tensors out. Cheap to import: `--help` reaches this module.

M target tokens, B sequences (a prompt with one response each), Q pairs of sequences with the same prompt, the first
better than the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from training.utils.flags.added import with_added
from training.utils.plugins.objectives import PreferenceLoss
from training.utils.preference.arguments import PairLossArguments

if TYPE_CHECKING:
    import torch

BETA_SCHEDULES = ("linear", "cosine")


@dataclass(frozen=True)
class Responses:
    """The responses of a micro-batch.

    ratios_B: of `log_ratios`.
    logprobs_B: float32, summed over a response's tokens, tokens_B of them.
    better_Q, worse_Q: int64, sequences. weight_Q: each pair's share of its prompt; a prompt with K ranked responses has
        K(K-1)/2 pairs that share a weight of 1, so that all prompts weigh the same.
    is_best_B: bool, whether the response is the first of its prompt's.
    columns: numbers of the rows by their names, [B] each.
    reference_point: of the loss's `FirstPass`, a log-ratio.
    """

    ratios_B: torch.Tensor
    logprobs_B: torch.Tensor
    tokens_B: torch.Tensor
    better_Q: torch.Tensor
    worse_Q: torch.Tensor
    weight_Q: torch.Tensor
    is_best_B: torch.Tensor
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    reference_point: float = 0.0


def pair_figures(rewards_B: torch.Tensor, responses: Responses) -> dict[str, float | torch.Tensor]:
    """Sums over pairs, of which `DpoEvaluation` has the means."""
    better_Q, worse_Q = (rewards_B.index_select(0, side_Q) for side_Q in (responses.better_Q, responses.worse_Q))
    return {
        "pairs": better_Q.numel(),
        "right": (better_Q > worse_Q).sum(),
        "chosen_reward": better_Q.sum(),
        "rejected_reward": worse_Q.sum(),
    }


def mark_figures(rewards_B: torch.Tensor, responses: Responses) -> dict[str, float | torch.Tensor]:
    """Sums over responses that are marked one by one; `chosen` and `rejected` count the good and the bad ones. Right is
    a good one whose log-ratio is above the reference point, and a bad one whose is below."""
    good_B, ratios_B = responses.columns["is_good"] > 0, responses.ratios_B.detach()
    right_B = (good_B & (ratios_B > responses.reference_point)) | (~good_B & (ratios_B < responses.reference_point))
    return {
        "pairs": good_B.numel(),
        "right": right_B.sum(),
        "chosen": good_B.sum(),
        "rejected": (~good_B).sum(),
        "chosen_reward": (good_B * rewards_B).sum(),
        "rejected_reward": (~good_B * rewards_B).sum(),
    }


FIGURES = {"ranked": pair_figures, "marked": mark_figures}  # of an evaluation, by the kind of rows


@dataclass(frozen=True)
class Objective:
    """A loss, alone or in a sum, and its constants.

    beta: cost of leaving the reference
    options: the values of `loss.flags`
    weight: in the sum
    ld_alpha: weight in log-ratios of tokens beyond the length of the prompt's shortest response
    name: of the loss in the table
    """

    loss: PreferenceLoss
    beta: float
    options: Any = None
    weight: float = 1.0
    ld_alpha: float = 1.0
    name: str = ""


def log_ratios(
    logprobs_B: torch.Tensor, reference_B: torch.Tensor, tokens_B: torch.Tensor, loss: PreferenceLoss
) -> torch.Tensor:
    """Return [B], log(policy / reference) of each response; times beta it is the implicit reward (Rafailov et al.
    2023, equation 5, but for a constant of the prompt).

    logprobs_B, reference_B: float32, log-probabilities summed over a response's tokens, tokens_B of them.
    """
    ratios_B = logprobs_B - reference_B if loss.needs_reference else logprobs_B
    return ratios_B / tokens_B if loss.is_token_mean else ratios_B


def preference_loss(responses: Responses, prompts_in_step: float, objective: Objective) -> torch.Tensor:
    """Return this micro-batch's part of the step's loss, a scalar, without the objective's weight. prompts_in_step: of
    the whole optimizer step, on all ranks."""
    of_margins, of_responses = objective.loss.of_margins, objective.loss.of_responses
    if of_responses is not None:
        return of_responses(responses, objective) / prompts_in_step
    assert of_margins is not None
    return of_pairs(responses, lambda better_Q, worse_Q: of_margins(better_Q - worse_Q, objective)) / prompts_in_step


def weighted_sum(losses: Sequence[torch.Tensor], objectives: Sequence[Objective]) -> torch.Tensor:
    """Return the sum of the terms by their weights. losses: of `preference_loss`, one for each objective."""
    first, *rest = (
        loss if objective.weight == 1.0 else objective.weight * loss
        for loss, objective in zip(losses, objectives, strict=True)
    )
    for term in rest:
        first = first + term
    return first


def of_pairs(responses: Responses, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the sum over pairs of their weighted losses, a scalar. loss: (log-ratios [Q] of the better responses, of
    the worse) -> [Q]."""
    better_Q, worse_Q = (
        responses.ratios_B.index_select(0, side_Q) for side_Q in (responses.better_Q, responses.worse_Q)
    )
    return (loss(better_Q, worse_Q) * responses.weight_Q).sum()


def best_likelihood(responses: Responses) -> torch.Tensor:
    """Return the sum over prompts of the best response's mean negative log-likelihood a token, a scalar (Pang et al.
    2024, equation 1, the second term)."""
    return -(responses.logprobs_B / responses.tokens_B * responses.is_best_B).sum()


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


LOSSES = with_added(
    "preference_losses",
    {
        "sigmoid": PreferenceLoss(
            "is DPO (Rafailov et al. 2023)",
            sigmoid,
            PairLossArguments,
            loss_of_equal_pairs=lambda objective: math.log(2.0),
        ),
        "ipo": PreferenceLoss(
            "is the squared loss on log-probabilities per token (Azar et al. 2023)", ipo, is_token_mean=True
        ),
        "hinge": PreferenceLoss("is SLiC's loss (Zhao et al. 2023)", hinge),
        "sft": PreferenceLoss(
            "is the best response's negative log-likelihood per token, to add to another loss",
            of_responses=lambda responses, objective: best_likelihood(responses),
            needs_reference=False,
        ),
    },
    PreferenceLoss,
)


class BetaSchedule(NamedTuple):
    """Beta from `first` in the first optimizer step to `last` in the last one. form: of BETA_SCHEDULES."""

    first: float
    last: float
    form: str = "linear"

    def at(self, step: int, total_steps: int) -> float:
        """Beta of an optimizer step, 1 to total_steps, and of evaluations after it; 0 is before the first."""
        share = min(max(step - 1, 0) / max(total_steps - 1, 1), 1.0)
        if self.form == "cosine":
            share = (1.0 - math.cos(math.pi * share)) / 2.0
        return self.first + share * (self.last - self.first)


def reads_mismatched(objectives: Sequence[Objective]) -> bool:
    """True if a loss reads prompts with the responses of other rows."""
    return any(one.loss.first_pass is not None and one.loss.first_pass.reads_mismatched for one in objectives)


def at_beta(objectives: Sequence[Objective], beta: float) -> tuple[Objective, ...]:
    """The same with another beta."""
    return tuple(replace(objective, beta=beta) for objective in objectives)
