"""KTO: each response alone, good or bad, against how far the policy has moved in general."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.step2_dpo.losses.pairs import FirstPass, Objective, PreferenceLoss, Responses, mark_figures
from training.utils.flags.flags import flag

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


@dataclass
class KtoArguments:
    """Flags of this loss."""

    desirable_weight: float = flag(1.0, "'kto' only: weight of the losses of good responses.", "factor > 0")
    undesirable_weight: float = flag(1.0, "'kto' only: weight of the losses of bad responses.", "factor > 0")


def of_responses(responses: Responses, objective: Objective) -> torch.Tensor:
    """Ethayarajh et al. 2024, equations 7 and 8, without their constant: weight x (1 - sigmoid(beta (r - z))) of a good
    response, weight x (1 - sigmoid(beta (z - r))) of a bad one, where z is `reference_point`."""
    import torch

    is_good_B, weights = responses.columns["is_good"] > 0, objective.options
    gains_B = objective.beta * (responses.ratios_B - responses.reference_point)
    good_B = weights.desirable_weight * (1.0 - gains_B.sigmoid())
    bad_B = weights.undesirable_weight * (1.0 - (-gains_B).sigmoid())
    return torch.where(is_good_B, good_B, bad_B).sum()


def point_sums(responses: Responses) -> dict[str, float | torch.Tensor]:
    """Sums over responses of other rows."""
    return {"ratios": responses.ratios_B.sum(), "rows": float(responses.ratios_B.numel())}


def point_of(totals: Mapping[str, float]) -> float:
    """Return z, an estimate of KL(policy || reference): the mean over mismatched prompts and responses, at least 0. The
    bound is put on the mean over the whole step: a mean of bounded parts would be larger."""
    return max(totals["ratios"] / max(totals["rows"], 1.0), 0.0)


LOSS = PreferenceLoss(
    "is KTO, on responses that are marked good or bad one by one (Ethayarajh et al. 2024)",
    flags=KtoArguments,
    of_responses=of_responses,
    rows="marked",
    figures=mark_figures,
    first_pass=FirstPass(point_sums, point_of, reads_mismatched=True),
)
