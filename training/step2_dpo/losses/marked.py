"""Losses on responses that are marked good or bad one by one. Pure: tensors in, tensors out. Cheap to import.

B sequences (a prompt with one response each).
"""

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
    """Flags of `kto`."""

    desirable_weight: float = flag(1.0, "'kto' only: weight of the losses of good responses.", "factor > 0")
    undesirable_weight: float = flag(1.0, "'kto' only: weight of the losses of bad responses.", "factor > 0")


def kto(responses: Responses, objective: Objective) -> torch.Tensor:
    """KTO (Ethayarajh et al. 2024, equations 7 and 8), without their constant: weight x (1 - sigmoid(beta (r - z))) of
    a good response, weight x (1 - sigmoid(beta (z - r))) of a bad one, where z is `reference_point`."""
    import torch

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
    from torch.nn.functional import logsigmoid

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


MARKED = {
    "kto": PreferenceLoss(
        "is KTO, on responses that are marked good or bad one by one (Ethayarajh et al. 2024)",
        flags=KtoArguments,
        of_responses=kto,
        rows="marked",
        figures=mark_figures,
        first_pass=FirstPass(kto_point_sums, kto_point_of, reads_mismatched=True),
    ),
    "bco": PreferenceLoss(
        "is BCO, on such responses too (Jung et al. 2024)",
        of_responses=bco,
        rows="marked",
        figures=mark_figures,
        first_pass=FirstPass(bco_point_sums, bco_point_of),
    ),
}
