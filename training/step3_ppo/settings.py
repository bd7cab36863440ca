"""What the trainer of step 3 is told, and what it tells at the end."""

from __future__ import annotations

from dataclasses import dataclass

from training.step3_ppo.evaluation import Evaluation
from training.step3_ppo.experience import ExperienceSettings
from training.step3_ppo.rollout.base import Sampling


@dataclass(frozen=True)
class PpoSettings:
    """Counts are of one rank. total_rollouts: of the run; each is followed by ppo_epochs passes over minibatches."""

    total_rollouts: int
    prompts_per_batch: int
    generation_batches: int
    sequences_per_minibatch: int
    ppo_epochs: int
    clip_range: float
    clip_range_value: float
    unsup_coef: float
    eval_interval: int
    seed: int
    sampling: Sampling
    experience: ExperienceSettings


@dataclass(frozen=True)
class PpoResult:
    """The evaluations on held-out prompts before and after training."""

    before: Evaluation
    after: Evaluation
    seconds: float
