"""Binary classifier optimisation: the implicit reward tells good responses from bad ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.step2_dpo.losses.pairs import FirstPass, Objective, PreferenceLoss, Responses, mark_figures

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


def of_responses(responses: Responses, objective: Objective) -> torch.Tensor:
    """Jung et al. 2024: the cross-entropy of sigmoid(beta r - delta) against the mark, where delta is beta times
    `reference_point`. Their weights of the difference between prompts of good and bad responses (UDM) are left out."""
    from torch.nn.functional import logsigmoid

    signs_B = 2.0 * responses.columns["is_good"] - 1.0
    return -logsigmoid(signs_B * objective.beta * (responses.ratios_B - responses.reference_point)).sum()


def point_sums(responses: Responses) -> dict[str, float | torch.Tensor]:
    """Sums over the good responses and over the bad ones."""
    ratios_B, good_B = responses.ratios_B, responses.columns["is_good"]
    return {
        "good_ratios": (good_B * ratios_B).sum(),
        "good": good_B.sum(),
        "bad_ratios": ((1.0 - good_B) * ratios_B).sum(),
        "bad": (1.0 - good_B).sum(),
    }


def point_of(totals: Mapping[str, float]) -> float:
    """Return half-way between the mean log-ratios of good and bad responses; the one mean where the step has no others.
    The authors take a mean over past steps, which depends on when a run was begun."""
    means = [totals[f"{side}_ratios"] / totals[side] for side in ("good", "bad") if totals[side]]
    return sum(means) / max(len(means), 1)


LOSS = PreferenceLoss(
    "is BCO, on such responses too (Jung et al. 2024)",
    of_responses=of_responses,
    rows="marked",
    figures=mark_figures,
    first_pass=FirstPass(point_sums, point_of),
)
