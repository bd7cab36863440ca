"""What the trainer of step 3 is told, and what it tells at the end."""

from __future__ import annotations

from dataclasses import dataclass

from training.step3_ppo.evaluation import Evaluation
from training.step3_ppo.experience import ExperienceSettings
from training.step3_ppo.learning import LearningSettings
from training.step3_ppo.rollout.base import Sampling
from training.utils.models.flops import ComputeMeter
from training.utils.run.traces import NO_TRACES, Traces


@dataclass(frozen=True)
class PpoSettings:
    """Counts are of one rank. total_rollouts: of the run; each is followed by ppo_epochs passes over minibatches.
    critic_warmup: first rollouts that train the critic alone. dynamic_sampling_tries: 0 takes prompts as they come.
    stop_kl, stop_update_kl: see the flags. meters: of actor and critic; none leave MFU out."""

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
    evaluates_first: bool = True
    stop_kl: float | None = None
    stop_update_kl: float | None = None
    meters: tuple[ComputeMeter, ...] = ()
    traces: Traces = NO_TRACES


@dataclass(frozen=True)
class PpoResult:
    """The evaluations on held-out prompts before (None where there was none) and after training."""

    before: Evaluation | None
    after: Evaluation
    seconds: float
