"""Advantage estimators. The room serves `--advantage`, by the table of its names. Cheap to import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.utils.base.tables import either, imported

if TYPE_CHECKING:
    import torch

    from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings


@dataclass(frozen=True)
class Estimator:
    """An entry of the table; a user's is one too, or its function alone.

    estimate: see `advantages.inputs`.
    needs_critic: reads values.
    needs_groups: compares the samples of a prompt, so a prompt needs two or more.
    needs_greedy: reads the score of a greedy response.
    needs_policy: reads log-probabilities and collision probabilities of the policy that rolled out.
    whitens: by default, its advantages are whitened over the tokens of all ranks.
    norms: reads `--norm_adv_over`.
    returns_alone: a sequence's returns follow from its own rewards and values.
    """

    estimate: Callable[[AdvantageInputs, AdvantageSettings], tuple[torch.Tensor, torch.Tensor | None]]
    needs_critic: bool = False
    needs_groups: bool = False
    needs_greedy: bool = False
    needs_policy: bool = False
    whitens: bool = False
    norms: bool = False
    returns_alone: bool = False


_GROUPS, _RETURNS = f"{__name__}.groups", f"{__name__}.returns"
_OTB = f"{__name__}.optimal_token_baseline"
NO_ADVANTAGE = "none"  # for a teacher alone
ESTIMATORS = {
    "gae": Estimator(imported(f"{_RETURNS}:gae"), needs_critic=True, whitens=True, returns_alone=True),
    "grpo": Estimator(imported(f"{_GROUPS}:grpo"), needs_groups=True, norms=True),
    "grpo_passk": Estimator(imported(f"{_GROUPS}:grpo_passk"), needs_groups=True, norms=True),
    "rloo": Estimator(imported(f"{_GROUPS}:rloo"), needs_groups=True, norms=True),
    "reinforce++": Estimator(imported(f"{_RETURNS}:reinforce_plus_plus"), whitens=True),
    "reinforce++_baseline": Estimator(
        imported(f"{_RETURNS}:reinforce_plus_plus_baseline"), needs_groups=True, whitens=True
    ),
    "remax": Estimator(imported(f"{_RETURNS}:remax"), needs_greedy=True),
    "opo": Estimator(imported(f"{_GROUPS}:opo"), needs_groups=True),
    "gpg": Estimator(imported(f"{_GROUPS}:gpg"), needs_groups=True),
    "optimal_token_baseline": Estimator(
        imported(f"{_OTB}:optimal_token_baseline"), needs_groups=True, needs_policy=True
    ),
    "tir_optimal_token_baseline": Estimator(
        imported(f"{_OTB}:tir_optimal_token_baseline"), needs_groups=True, needs_policy=True
    ),
    NO_ADVANTAGE: Estimator(imported(f"{_RETURNS}:none")),
}
WITH_CRITIC = either(name for name, estimator in ESTIMATORS.items() if estimator.needs_critic)
