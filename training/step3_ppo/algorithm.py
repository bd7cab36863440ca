"""The flags of step 3's algorithm become settings: names are looked up here, defaults that depend on them are filled
in, and what does not go together is told before a model loads."""

from __future__ import annotations

from dataclasses import dataclass

from training.step3_ppo.advantages import ESTIMATORS, Estimator
from training.step3_ppo.advantages.inputs import AdvantageSettings
from training.step3_ppo.algorithm_arguments import AlgorithmArguments
from training.step3_ppo.arguments import PpoArguments
from training.step3_ppo.experience import ExperienceSettings, KlSettings, LengthSettings, MismatchSettings
from training.step3_ppo.kl import KL_ESTIMATORS, WHOLE_KL_ESTIMATORS
from training.step3_ppo.learning import LearningSettings
from training.step3_ppo.losses import POLICY_LOSSES, PolicyLoss, PolicyLossSettings
from training.step3_ppo.losses.aggregation import AGGREGATIONS
from training.step3_ppo.rewards.weighted import MODEL_ALONE, Rewards
from training.utils.layout.planner import PlanSettings
from training.utils.models.score_scale import ScoreScale
from training.utils.run.errors import Mistakes


@dataclass(frozen=True)
class Algorithm:
    """The flags, and what their names stand for."""

    flags: AlgorithmArguments
    estimator: Estimator
    policy_loss: PolicyLoss

    @property
    def wants_reference(self) -> bool:
        return self.flags.kl_coef > 0


def checked_algorithm(flags: AlgorithmArguments, ppo: PpoArguments, mistakes: Mistakes) -> Algorithm | None:
    """Look every name up and note what does not go together; None where a name is unknown."""
    known = True
    for flag, name, table in (
        ("--advantage", flags.advantage, ESTIMATORS),
        ("--policy_loss", flags.policy_loss, POLICY_LOSSES),
        ("--kl_estimator", flags.kl_estimator, {**KL_ESTIMATORS, **WHOLE_KL_ESTIMATORS}),
        ("--loss_aggregation", flags.loss_aggregation, AGGREGATIONS),
    ):
        if name is not None:
            mistakes.require_one_of(flag, name, table)
            known = known and name in table
    if not known:
        return None
    estimator = ESTIMATORS[flags.advantage]
    samples = ppo.num_samples_per_prompt
    mistakes.require(
        not estimator.needs_groups or samples > 1,
        f"--advantage {flags.advantage} compares the samples of a prompt and --num_samples_per_prompt is {samples}; "
        "give 2 or more, or use gae, reinforce++ or remax",
    )
    mistakes.require(
        flags.dynamic_sampling_tries == 0 or samples > 1,
        f"--dynamic_sampling_tries compares the samples of a prompt and --num_samples_per_prompt is {samples}; give 2 "
        "or more",
    )
    mistakes.require(
        flags.critic_warmup == 0 or estimator.needs_critic,
        f"--critic_warmup {flags.critic_warmup} trains a critic, and --advantage {flags.advantage} has none; leave it "
        "out or use gae",
    )
    mistakes.require(
        flags.overlong_buffer_tokens <= ppo.max_answer_seq_len,
        f"--overlong_buffer_tokens expects at most --max_answer_seq_len {ppo.max_answer_seq_len}, got "
        f"{flags.overlong_buffer_tokens}",
    )
    return Algorithm(flags, estimator, POLICY_LOSSES[flags.policy_loss])


def experience_settings(
    algorithm: Algorithm,
    ppo: PpoArguments,
    scale: ScoreScale | None,
    plan: PlanSettings,
    pad_token_id: int,
    rewards: Rewards = MODEL_ALONE,
    rank: int = 0,
) -> ExperienceSettings:
    """Of parts 3 to 6."""
    flags, estimator = algorithm.flags, algorithm.estimator
    in_loss = flags.kl_in == "loss"
    estimator_name = flags.kl_estimator or ("k3" if in_loss else "k1")
    kl = KlSettings(
        coefficient=flags.kl_coef,
        in_loss=in_loss,
        estimate={**KL_ESTIMATORS, **WHOLE_KL_ESTIMATORS}[estimator_name],
        of_logits=estimator_name in WHOLE_KL_ESTIMATORS,
        target=flags.kl_target if flags.kl_control == "adaptive" else None,
        horizon=flags.kl_horizon,
    )
    mismatch, correction = None, mismatch_correction(algorithm, ppo)
    if correction != "none":
        mismatch = MismatchSettings(correction, flags.mismatch_level, flags.mismatch_threshold)
    whiten = estimator.whitens if flags.whiten_advantages is None else flags.whiten_advantages
    return ExperienceSettings(
        temperature=ppo.temperature,
        score_scale=scale,
        clip_reward=ppo.clip_reward,
        samples_per_prompt=ppo.num_samples_per_prompt,
        estimator=estimator,
        advantage=AdvantageSettings(flags.gamma, flags.lam, flags.norm_adv_by_std),
        whiten_advantages=whiten,
        kl=kl,
        length=LengthSettings(
            max_tokens=ppo.max_answer_seq_len,
            missing_eos_penalty=flags.missing_eos_penalty,
            overlong_buffer_tokens=flags.overlong_buffer_tokens,
            overlong_penalty=flags.overlong_penalty,
            mask_truncated_responses=flags.mask_truncated_responses,
        ),
        mismatch=mismatch,
        reads_old_logprobs=_reads_old_logprobs(algorithm, ppo),
        plan=plan,
        pad_token_id=pad_token_id,
        rewards=rewards,
        rank=rank,
        keeps_forwards=ppo.reuse_forwards,
        with_entropy=ppo.reuse_forwards and flags.entropy_coef > 0,
    )


def learning_settings(algorithm: Algorithm, ppo: PpoArguments) -> LearningSettings:
    """Of part 7. A clip of one direction goes before that of both, and that before the loss's own."""
    flags, policy_loss = algorithm.flags, algorithm.policy_loss

    def bound(one_way: float | None, own: float) -> float:
        return next(value for value in (one_way, flags.clip_range, own) if value is not None)

    return LearningSettings(
        policy_loss=policy_loss,
        policy=PolicyLossSettings(
            clip_low=bound(flags.clip_range_low, policy_loss.clip_low),
            clip_high=bound(flags.clip_range_high, policy_loss.clip_high),
            dual_clip=flags.dual_clip,
            kl_cov_coef=flags.kl_cov_coef,
        ),
        aggregation=flags.loss_aggregation or policy_loss.aggregation,
        clip_range_value=flags.clip_range_value,
        entropy_coef=flags.entropy_coef,
        cov_share=flags.cov_share,
        clip_cov_low=flags.clip_cov_low,
        clip_cov_high=flags.clip_cov_high,
        unsup_coef=ppo.unsup_coef,
    )


def mismatch_correction(algorithm: Algorithm, ppo: PpoArguments) -> str:
    """What is asked for; where nothing is, rollouts by another program than the trained one are corrected."""
    return algorithm.flags.mismatch_correction or ("truncate" if ppo.rollout_engine == "vllm" else "none")


def _reads_old_logprobs(algorithm: Algorithm, ppo: PpoArguments) -> bool:
    """False where the actor takes one step on each rollout, so that the old policy is the one that is trained, and
    neither the reward's KL, nor a correction, nor the choice of tokens needs it earlier. Forwards that are kept
    have it anyhow."""
    flags = algorithm.flags
    one_step = ppo.steps_per_rollout == 1
    kl_in_reward = algorithm.wants_reference and flags.kl_in == "reward"
    corrected = mismatch_correction(algorithm, ppo) != "none"
    chosen = algorithm.policy_loss.keys is not None
    return ppo.reuse_forwards or not one_step or kl_in_reward or corrected or chosen
