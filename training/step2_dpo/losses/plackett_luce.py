"""DPO on the whole ranking of K responses at once, by Plackett and Luce's model of rankings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.step2_dpo.losses.pairs import Objective, PreferenceLoss, Responses

if TYPE_CHECKING:
    import torch


def of_responses(responses: Responses, objective: Objective) -> torch.Tensor:
    """Rafailov et al. 2023, appendix A.3: the sum over all but the last response of
    -log(exp(beta r_k) / sum over j from k on of exp(beta r_j)), that is of log(1 + sum over worse j of
    exp(beta (r_j - r_k))). Of two responses it is DPO. A prompt's K - 1 terms are added up, and have no other weight.
    """
    import torch

    ratios_B, better_Q = responses.ratios_B, responses.better_Q
    gaps_Q = objective.beta * (ratios_B.index_select(0, responses.worse_Q) - ratios_B.index_select(0, better_Q))
    # log(1 + the sum) from the largest term, the 1 among them: nothing overflows.
    most_B = torch.zeros_like(ratios_B).scatter_reduce(0, better_Q, gaps_Q.detach(), "amax")
    sums_B = (-most_B).exp().index_add(0, better_Q, (gaps_Q - most_B.index_select(0, better_Q)).exp())
    return (most_B + sums_B.log()).sum()  # 0 of responses that are better than none


LOSS = PreferenceLoss(
    "is DPO on the whole ranking of K responses (Plackett-Luce; Rafailov et al. 2023, app. A.3)",
    of_responses=of_responses,
)
