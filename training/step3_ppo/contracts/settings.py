"""Settings of step 3's loop and its parts. The flags hold the defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.utils.base.console import LogPace
from training.utils.layout.rank_share import SequenceRows, rank_share
from training.utils.rewards.weighted import MODEL_ALONE, Rewards
from training.utils.run.traces import Traces

if TYPE_CHECKING:
    import torch

    from training.step3_ppo.advantages import Estimator
    from training.step3_ppo.advantages.inputs import AdvantageSettings
    from training.step3_ppo.kl import KlEstimator
    from training.step3_ppo.kl.control import KlControl
    from training.step3_ppo.losses import PolicyLoss
    from training.step3_ppo.losses.tokens import PolicyLossSettings
    from training.step3_ppo.mismatch.settings import MismatchSettings
    from training.utils.contracts.documents import TokenSequence
    from training.utils.contracts.media import RunMedia
    from training.utils.contracts.rollout_engine import Sampling
    from training.utils.contracts.rows import PromptRow
    from training.utils.layout.planner import PlanSettings
    from training.utils.loading.score_scale import ScoreScale
    from training.utils.models.flops import ComputeMeter


@dataclass(frozen=True)
class KlSettings:
    """control: of the coefficient, as a run starts. in_loss: the KL is part of the loss, otherwise of the reward."""

    control: KlControl
    in_loss: bool
    estimator: KlEstimator


@dataclass(frozen=True)
class LengthSettings:
    """What the end and the length of a response do to its score; see the flags of the same names. max_tokens: of a
    response. max_prompt_tokens: of a prompt, None if unknown."""

    max_tokens: int
    missing_eos_penalty: float = 0.0
    overlong_buffer_tokens: int = 0
    overlong_penalty: float = 0.0
    mask_truncated_responses: bool = False
    max_prompt_tokens: int | None = None


@dataclass(frozen=True)
class ExperienceSettings:
    """Of parts 3 to 6; see the flags of the same names.

    score_scale: of --normalize_reward_scores, or None.
    samples_per_prompt: adjacent sequences of a rollout that form a group.
    mismatch: None does not correct.
    reads_old_logprobs: False where the update is exactly on-policy and nothing else reads them.
    rewards: their weighted sum is the score; score_scale and clip_reward are the reward model's.
    rank: this one, of plan.ranks.
    reuses_forwards: read with graphs, from which the one update learns; excludes dropout.
    with_entropy: of the forwards that are reused.
    reports_variance: variance proxies of the gradient, from the policy's distributions.
    media: of the prompts; None where none has some.
    """

    temperature: float
    score_scale: ScoreScale | None
    clip_reward: float
    samples_per_prompt: int
    estimator: Estimator
    advantage: AdvantageSettings
    whiten_advantages: bool
    kl: KlSettings
    length: LengthSettings
    mismatch: MismatchSettings | None
    reads_old_logprobs: bool
    plan: PlanSettings
    pad_token_id: int
    rewards: Rewards = MODEL_ALONE
    rank: int = 0
    reuses_forwards: bool = False
    with_entropy: bool = False
    reports_variance: bool = False
    media: RunMedia | None = None

    @property
    def reads_collisions(self) -> bool:
        """Whether the old policy's forward sums the squares of its probabilities."""
        return self.estimator.needs_policy or self.reports_variance

    def media_of(self, prompts: Sequence[PromptRow]) -> Any:
        """Return what a rollout reads of the media of prompts (`RolloutRequest.media`); None where none has some."""
        return None if self.media is None else self.media.of_prompts([row.media for row in prompts])

    def share(
        self,
        sequences: Sequence[TokenSequence],
        device: torch.device,
        sharing: bool = True,
        with_before: bool = False,
    ) -> list[SequenceRows]:
        """Return this rank's share of all ranks' sequences, as micro-batches on the CPU, pinned for `device`."""
        plan, pad, rank, media = self.plan, self.pad_token_id, self.rank, self.media
        return rank_share(
            sequences, plan, pad, rank, device=device, sharing=sharing, with_before=with_before, media=media
        )


@dataclass(frozen=True)
class LearningSettings:
    """Of part 7; see the flags of the same names. policy_loss, aggregation: entries of their tables. bypass: the
    correction where the loss makes it, from the policy of each update; None where the experience has it."""

    policy_loss: PolicyLoss
    policy: PolicyLossSettings
    aggregation: str
    clip_range_value: float
    entropy_coef: float
    cov_share: float
    clip_cov_low: float
    clip_cov_high: float
    unsup_coef: float
    bypass: MismatchSettings | None = None


@dataclass(frozen=True)
class PpoSettings:
    """Of the loop; counts are per rank.

    total_rollouts: of the run; each is followed by ppo_epochs passes over minibatches.
    critic_warmup: number of first rollouts that train only the critic.
    dynamic_sampling_tries: 0 keeps all prompts.
    stop_kl, stop_update_kl: see the flags.
    meters: of actor and critic; empty leaves MFU out.
    rollouts_per_epoch: not rounded.
    """

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
    evaluates_first: bool
    stop_kl: float | None = None
    stop_update_kl: float | None = None
    meters: tuple[ComputeMeter, ...] = ()
    traces: Traces = Traces()
    eval_epochs: float = 0.0
    rollouts_per_epoch: float = 0.0
    log_pace: LogPace = LogPace()
