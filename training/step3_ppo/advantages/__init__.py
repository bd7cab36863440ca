"""Advantage estimators, one file each, and the table of their names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from training.step3_ppo.advantages.gae import gae
from training.step3_ppo.advantages.gpg import gpg
from training.step3_ppo.advantages.grpo import grpo
from training.step3_ppo.advantages.grpo_passk import grpo_passk
from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings
from training.step3_ppo.advantages.opo import opo
from training.step3_ppo.advantages.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from training.step3_ppo.advantages.remax import remax
from training.step3_ppo.advantages.rloo import rloo


@dataclass(frozen=True)
class Estimator:
    """estimate: see `advantages.inputs`. needs_critic: reads values. needs_groups: compares the samples of a prompt, so
    that a prompt needs two or more. needs_greedy: reads the score of a greedy response. whitens: its advantages are
    whitened over the tokens of all ranks unless the user says otherwise."""

    estimate: Callable[[AdvantageInputs, AdvantageSettings], tuple[torch.Tensor, torch.Tensor | None]]
    needs_critic: bool = False
    needs_groups: bool = False
    needs_greedy: bool = False
    whitens: bool = False


ESTIMATORS = {
    "gae": Estimator(gae, needs_critic=True, whitens=True),
    "grpo": Estimator(grpo, needs_groups=True),
    "grpo_passk": Estimator(grpo_passk, needs_groups=True),
    "rloo": Estimator(rloo, needs_groups=True),
    "reinforce++": Estimator(reinforce_plus_plus, whitens=True),
    "reinforce++_baseline": Estimator(reinforce_plus_plus_baseline, needs_groups=True, whitens=True),
    "remax": Estimator(remax, needs_greedy=True),
    "opo": Estimator(opo, needs_groups=True),
    "gpg": Estimator(gpg, needs_groups=True),
}
