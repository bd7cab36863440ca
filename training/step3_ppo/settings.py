"""What the trainer of step 3 is told, and what it tells at the end."""

from __future__ import annotations

from dataclasses import dataclass

from training.step3_ppo.evaluation import Evaluation
from training.step3_ppo.experience import ExperienceSettings
from training.step3_ppo.learning import LearningSettings
from training.step3_ppo.rollout.base import Sampling


@dataclass(frozen=True)
class PpoSettings:
    """Counts are of one rank. total_rollouts: of the run; each is followed by ppo_epochs passes over minibatches.
    critic_warmup: first rollouts that train the critic alone. dynamic_sampling_tries: 0 takes prompts as they come."""

    total_rollouts: int
    prompts_per_batch: int
    generation_batches: int
    sequences_per_minibatch: int
    ppo_epochs: int
    critic_warmup: int
    dynamic_sampling_tries: int
    eval_interval: int
    seed: int
    sampling: Sampling
    experience: ExperienceSettings
    learning: LearningSettings


@dataclass(frozen=True)
class PpoResult:
    """The evaluations on held-out prompts before and after training."""

    before: Evaluation
    after: Evaluation
    seconds: float
