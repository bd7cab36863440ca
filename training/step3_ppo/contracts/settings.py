"""Settings of step 3's loop and its parts. The flags hold the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.step3_ppo.contracts.records import NO_CORRECTION, Correction
from training.utils.base.console import LogPace
from training.utils.contracts.run import StepObservers
from training.utils.layout.order import completes_epochs
from training.utils.rewards.weighted import MODEL_ALONE, Rewards

if TYPE_CHECKING:
    from training.step3_ppo.advantages.inputs import AdvantageSettings
    from training.step3_ppo.kl import KlControl, KlEstimator
    from training.step3_ppo.losses.losses import PolicyLossSettings
    from training.utils.contracts.rollout_engine import Sampling
    from training.utils.layout.trie import SequenceLayout
    from training.utils.loading.configurations import ScoreScale
    from training.utils.models.flops import ComputeMeter
    from training.utils.plugins.objectives import Estimator, PolicyLoss


@dataclass(frozen=True)
class KlSettings:
    """control: of the coefficient, as a run starts. in_loss: the KL is part of the loss, otherwise of the reward."""

    control: KlControl
    in_loss: bool
    estimator: KlEstimator


@dataclass(frozen=True)
class LengthSettings:
    """Effects of the end and the length of a response on its score; see the flags of the same names. max_tokens: of a
    response. max_prompt_tokens: of a prompt, None if unknown."""

    max_tokens: int
    missing_eos_penalty: float = 0.0
    overlong_buffer_tokens: int = 0
    overlong_penalty: float = 0.0
    mask_truncated_responses: bool = False
    max_prompt_tokens: int | None = None


@dataclass(frozen=True)
class ScoringSettings:
    """Settings of part 3. rewards: their weighted sum is the score. clip_reward, score_scale: the reward model's, the
    latter of --normalize_reward_scores, or None."""

    clip_reward: float
    length: LengthSettings
    rewards: Rewards = MODEL_ALONE
    score_scale: ScoreScale | None = None


@dataclass(frozen=True)
class ReadingSettings:
    """Settings of part 4.

    reads_old_logprobs: False where the update is exactly on-policy and nothing else reads them.
    reuses_forwards: the actor is read with graphs, from which the one update learns; with_entropy: of these.
    learns_values: the critic learns from the forwards that read. Both exclude dropout.
    with_collisions: the old policy's forward sums the squares of its probabilities.
    """

    temperature: float
    reads_old_logprobs: bool
    reuses_forwards: bool = False
    learns_values: bool = False
    with_entropy: bool = False
    with_collisions: bool = False


@dataclass(frozen=True)
class ExperienceSettings:
    """Settings of parts 3 to 6; see the flags of the same names.

    samples_per_prompt: adjacent sequences of a rollout that form a group.
    reports_variance: variance proxies of the gradient, from the policy's distributions.
    """

    samples_per_prompt: int
    layout: SequenceLayout
    scoring: ScoringSettings
    reading: ReadingSettings
    kl: KlSettings
    estimator: Estimator
    advantage: AdvantageSettings
    whiten_advantages: bool
    correction: Correction = NO_CORRECTION
    reports_variance: bool = False


@dataclass(frozen=True)
class LearningSettings:
    """Settings of the losses of part 7; see the flags of the same names.

    policy_loss, aggregation: entries of their tables.
    """

    policy_loss: PolicyLoss
    policy: PolicyLossSettings
    aggregation: str
    clip_range_value: float
    entropy_coef: float


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of part 7: ppo_epochs passes over a rollout, in minibatches of sequences_per_minibatch of each rank.

    critic_warmup: number of first rollouts that train only the critic.
    meters: of actor and critic; empty leaves MFU out.
    """

    learning: LearningSettings
    sequences_per_minibatch: int
    ppo_epochs: int
    critic_warmup: int = 0
    stop_update_kl: float | None = None
    meters: tuple[ComputeMeter, ...] = ()


@dataclass(frozen=True)
class DrawingSettings:
    """Settings of parts 1 and 2; counts are per rank. dynamic_sampling_tries: 0 keeps all prompts."""

    sampling: Sampling
    prompts_per_batch: int
    generation_batches: int = 1
    dynamic_sampling_tries: int = 0


@dataclass(frozen=True)
class EvaluationTimes:
    """When held-out prompts are evaluated, besides after the last rollout. rollouts_per_epoch: not rounded."""

    evaluates_first: bool
    eval_interval: int = 0
    eval_epochs: float = 0.0
    rollouts_per_epoch: float = 0.0

    def are_due(self, rollouts: int) -> bool:
        """Return whether held-out prompts are due after so many rollouts."""
        by_count = self.eval_interval > 0 and rollouts % self.eval_interval == 0
        return by_count or completes_epochs(rollouts, self.eval_epochs, self.rollouts_per_epoch)


@dataclass(frozen=True)
class PpoSettings:
    """Settings of the loop. total_rollouts: of the run. stop_kl: see the flag. method: its name in logs."""

    total_rollouts: int
    seed: int
    drawing: DrawingSettings
    experience: ExperienceSettings
    updates: UpdateSettings
    evaluation: EvaluationTimes
    stop_kl: float | None = None
    step_observers: StepObservers = StepObservers()
    log_pace: LogPace = LogPace()
    method: str = "PPO"
