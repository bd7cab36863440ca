"""Entries of the table of preference losses, and the flags that each loss alone has. Cheap to import: `--help` reaches
this module."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from training.utils.base.user_files import imported
from training.utils.flags.flags import flag
from training.utils.plugins.objectives import FirstPass, PreferenceLoss
from training.utils.preference.arguments import PairLossArguments


@dataclass
class SimpoArguments(PairLossArguments):
    """Flags of `simpo`."""

    simpo_gamma: float = flag(
        0.5, "'simpo' only: target margin for beta times the difference in log-probabilities.", "nats >= 0"
    )


@dataclass
class CpoArguments(PairLossArguments):
    """Flags of `cpo`."""

    cpo_alpha: float = flag(
        1.0, "'cpo' only: weight of the best response's negative log-likelihood per token.", "factor >= 0"
    )


@dataclass
class KtoArguments:
    """Flags of `kto`."""

    desirable_weight: float = flag(1.0, "'kto' only: weight of the loss on good responses.", "factor > 0")
    undesirable_weight: float = flag(1.0, "'kto' only: weight of the loss on bad responses.", "factor > 0")


def _log_two(objective: Any) -> float:
    return math.log(2.0)


def _one(objective: Any) -> float:
    return 1.0


def _simpo_of_equal_pairs(objective: Any) -> float:
    gamma, flipped = objective.options.simpo_gamma, objective.options.label_smoothing
    return (1.0 - flipped) * math.log1p(math.exp(gamma)) + flipped * math.log1p(math.exp(-gamma))


def _kto_advice(good: int, bad: int, options: KtoArguments) -> str | None:
    ratio = options.desirable_weight * good / (options.undesirable_weight * bad)
    if 1.0 <= ratio <= 4.0 / 3.0:
        return None
    return (
        f"{good:,} good and {bad:,} bad responses: --desirable_weight x good is {ratio:.2f} times "
        "--undesirable_weight x bad, but KTO's authors advise a factor of 1 to 1.33 (Ethayarajh et al. 2024)"
    )


SIGMOID_NORM = PreferenceLoss(
    "is DPO on per-token log-ratios (Lambert et al. 2024)",
    imported("threestep.plugins.objectives.preferences:sigmoid_norm"),
    PairLossArguments,
    is_token_mean=True,
    loss_of_equal_pairs=_log_two,
)
ROBUST = PreferenceLoss(
    "is DPO's loss, corrected for a fraction --label_smoothing of wrong pairs (Chowdhury et al. 2024)",
    imported("threestep.plugins.objectives.preferences:robust"),
    PairLossArguments,
    loss_of_equal_pairs=_log_two,
)
APO_ZERO = PreferenceLoss(
    "is APO-zero (D'Oosterlinck et al. 2024)",
    of_responses=imported("threestep.plugins.objectives.preferences:apo_zero"),
    loss_of_equal_pairs=_one,
)
APO_DOWN = PreferenceLoss(
    "is APO-down (D'Oosterlinck et al. 2024)",
    of_responses=imported("threestep.plugins.objectives.preferences:apo_down"),
)
PLACKETT_LUCE = PreferenceLoss(
    "is DPO on the full ranking of K responses (Plackett-Luce; Rafailov et al. 2023, app. A.3)",
    of_responses=imported("threestep.plugins.objectives.preferences:plackett_luce"),
)
ORPO = PreferenceLoss(
    "is ORPO, likelihood plus odds ratio without a reference, for a model before SFT (Hong et al. 2024)",
    of_responses=imported("threestep.plugins.objectives.preferences:orpo"),
    is_token_mean=True,
    needs_reference=False,
)
SIMPO = PreferenceLoss(
    "is SimPO, on per-token log-probabilities without a reference; use --beta 2 to 10 (Meng et al. 2024)",
    imported("threestep.plugins.objectives.preferences:simpo"),
    SimpoArguments,
    is_token_mean=True,
    needs_reference=False,
    loss_of_equal_pairs=_simpo_of_equal_pairs,
)
CPO = PreferenceLoss(
    "is CPO, without a reference (Xu et al. 2024)",
    flags=CpoArguments,
    of_responses=imported("threestep.plugins.objectives.preferences:cpo"),
    needs_reference=False,
)
KTO = PreferenceLoss(
    "is KTO, on responses that are individually marked good or bad (Ethayarajh et al. 2024)",
    flags=KtoArguments,
    of_responses=imported("threestep.plugins.objectives.preferences:kto"),
    rows="marked",
    first_pass=FirstPass(
        imported("threestep.plugins.objectives.preferences:kto_point_sums"),
        imported("threestep.plugins.objectives.preferences:kto_point_of"),
        reads_mismatched=True,
    ),
    mark_advice=_kto_advice,
)
BCO = PreferenceLoss(
    "is BCO, also on individually marked responses (Jung et al. 2024)",
    of_responses=imported("threestep.plugins.objectives.preferences:bco"),
    rows="marked",
    first_pass=FirstPass(
        imported("threestep.plugins.objectives.preferences:bco_point_sums"),
        imported("threestep.plugins.objectives.preferences:bco_point_of"),
    ),
)
