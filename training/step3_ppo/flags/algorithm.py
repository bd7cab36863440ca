"""From the flags of step 3's algorithm to settings: names are looked up, defaults that depend on them are filled in,
and flags that do not go together are reported before a model loads. What a user's estimator or loss returns is
checked."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from training.step3_ppo.advantages import ESTIMATORS, NO_ADVANTAGE, WITH_CRITIC
from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings
from training.step3_ppo.contracts.records import NO_CORRECTION, Correction
from training.step3_ppo.contracts.settings import (
    ExperienceSettings,
    KlSettings,
    LearningSettings,
    LengthSettings,
    ReadingSettings,
    ScoringSettings,
)
from training.step3_ppo.kl import DEFAULT_KL_ESTIMATORS, KL_ESTIMATORS, KlControl, KlEstimator
from training.step3_ppo.losses import AGGREGATIONS, POLICY_LOSSES
from training.step3_ppo.losses.losses import PolicyLossSettings, PolicyTokens
from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import call_user, check_signature, either, entry_named, is_address
from training.utils.flags.added import own_options
from training.utils.flags.flags import settings_of
from training.utils.plugins.objectives import Estimator, PolicyLoss
from training.utils.plugins.registry import owner_sentence
from training.utils.rewards.weighted import MODEL_ALONE, Rewards

if TYPE_CHECKING:
    from training.step3_ppo.flags.arguments import AlgorithmArguments, PpoArguments
    from training.utils.base.errors import Mistakes
    from training.utils.layout.trie import SequenceLayout
    from training.utils.loading.configurations import ScoreScale


_Record = TypeVar("_Record", AdvantageInputs, PolicyTokens)


def estimator_named(given: str) -> Estimator:
    """Return the estimator of `--advantage`: a name, or FILE.py:NAME of an Estimator or its function."""
    estimator = entry_named("--advantage", given, ESTIMATORS, Estimator, owner=owner_sentence("advantages", given))
    if not is_address(given):
        return estimator
    check_signature(estimator.estimate, "--advantage", given, ("inputs", "settings"))

    def estimate(inputs: AdvantageInputs, settings: AdvantageSettings) -> tuple[torch.Tensor, torch.Tensor | None]:
        result = call_user(estimator.estimate, _copied(inputs), settings)
        names, shape = ("advantages_BR", "returns_BR"), inputs.rewards_BR.shape
        _check_pair("--advantage", given, names, result, shape=shape, is_complete=estimator.needs_critic)
        if inputs.over_ranks((~result[0].isfinite() & inputs.inside_BR).sum()):
            raise ThreestepError(
                f"--advantage: advantages_BR of '{given}' are not finite; do not divide by 0, as by the standard "
                "deviation of equal scores"
            )
        return result

    return replace(estimator, estimate=estimate)


def policy_loss_named(given: str) -> PolicyLoss:
    """Return the loss of `--policy_loss`: a name, or FILE.py:NAME of a PolicyLoss or its function."""
    owner = owner_sentence("policy_losses", given)
    policy_loss = entry_named("--policy_loss", given, POLICY_LOSSES, PolicyLoss, owner=owner)
    if not is_address(given):
        return policy_loss
    check_signature(policy_loss.loss, "--policy_loss", given, ("tokens", "settings"))

    def loss(tokens: PolicyTokens, settings: PolicyLossSettings) -> tuple[torch.Tensor, torch.Tensor]:
        result = call_user(policy_loss.loss, _copied(tokens), settings)
        _check_pair("--policy_loss", given, ("loss_M", "clipped_M"), result, shape=tokens.logprobs_M.shape)
        if tokens.logprobs_M.requires_grad and not result[0].requires_grad:
            raise ThreestepError(
                f"--policy_loss expects loss_M of '{given}' to have a gradient, got none; compute it from logprobs_M"
            )
        return result

    return replace(policy_loss, loss=loss)


def _copied(record: _Record) -> _Record:
    """Return the record with tensors of its own, which a user's function may change in place: the loop reads its own
    again. Gradients flow through the copies."""
    parts = {field.name: getattr(record, field.name) for field in fields(record)}
    copies: dict[str, Any] = {name: part.clone() for name, part in parts.items() if isinstance(part, torch.Tensor)}
    return replace(record, **copies)


def _check_pair(
    flag: str, given: str, names: tuple[str, str], result: Any, *, shape: torch.Size, is_complete: bool = True
) -> None:
    """is_complete: the second may not be None."""
    if not isinstance(result, tuple) or len(result) != 2:
        wanted = f"the pair ({', '.join(names)})"
        raise ThreestepError(f"{flag} expects '{given}' to return {wanted}, got {type(result).__name__}")
    for name, tensor in zip(names, result if is_complete or result[1] is not None else result[:1], strict=False):
        got = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        if got != list(shape):
            raise ThreestepError(f"{flag} expects {name} of '{given}' to be a tensor of shape {list(shape)}, got {got}")


@dataclass(frozen=True)
class Algorithm:
    """The flags, with the estimator, loss and other objects that they name."""

    flags: AlgorithmArguments
    estimator: Estimator
    policy_loss: PolicyLoss
    kl_estimator: KlEstimator
    correction: Correction = NO_CORRECTION

    @property
    def wants_reference(self) -> bool:
        return self.flags.kl_coef > 0


def selected_algorithm(
    flags: AlgorithmArguments, ppo: PpoArguments, mistakes: Mistakes, *, correction: Correction = NO_CORRECTION
) -> Algorithm | None:
    """Look names up, note flags that do not go together; None where a name is unknown. correction: of the rollouts."""
    estimator = mistakes.note(estimator_named, flags.advantage)
    policy_loss = mistakes.note(policy_loss_named, flags.policy_loss)
    known = estimator is not None and policy_loss is not None
    for flag, name, table in (
        ("--kl_estimator", flags.kl_estimator, KL_ESTIMATORS),
        ("--loss_aggregation", flags.loss_aggregation or (policy_loss or PolicyLoss).aggregation, AGGREGATIONS),
    ):
        if name is not None:
            mistakes.require_one_of(flag, name, table)
            known = known and name in table
    if not known:
        return None
    samples = ppo.num_samples_per_prompt
    alone = [name for name, entry in ESTIMATORS.items() if not entry.needs_groups and name != NO_ADVANTAGE]
    mistakes.require(
        not estimator.needs_groups or samples > 1,
        f"--advantage {flags.advantage} compares the samples of a prompt, but --num_samples_per_prompt is {samples}; "
        f"set it to 2 or more, or use {either(alone)}",
    )
    mistakes.require(
        flags.dynamic_sampling_tries == 0 or samples > 1,
        f"--dynamic_sampling_tries compares the samples of a prompt, but --num_samples_per_prompt is {samples}; set "
        "it to 2 or more",
    )
    mistakes.require(
        flags.critic_warmup == 0 or estimator.needs_critic,
        f"--critic_warmup {flags.critic_warmup} trains a critic, but --advantage {flags.advantage} has none; "
        f"remove --critic_warmup, or use --advantage {WITH_CRITIC}",
    )
    mistakes.require(
        flags.overlong_buffer_tokens <= ppo.max_answer_seq_len,
        f"--overlong_buffer_tokens expects at most {ppo.max_answer_seq_len} (--max_answer_seq_len), got "
        f"{flags.overlong_buffer_tokens}",
    )
    kl_estimator = KL_ESTIMATORS[flags.kl_estimator or DEFAULT_KL_ESTIMATORS[flags.kl_in]]
    return Algorithm(flags, estimator, policy_loss, kl_estimator, correction)


def experience_settings(
    algorithm: Algorithm,
    ppo: PpoArguments,
    layout: SequenceLayout,
    rewards: Rewards = MODEL_ALONE,
    *,
    scale: ScoreScale | None = None,
    max_prompt_tokens: int | None = None,
) -> ExperienceSettings:
    """Return the settings of parts 3 to 6."""
    flags, estimator = algorithm.flags, algorithm.estimator
    control = KlControl(flags.kl_coef, flags.kl_target if flags.kl_control == "adaptive" else None, flags.kl_horizon)
    kl = KlSettings(control, in_loss=flags.kl_in == "loss", estimator=algorithm.kl_estimator)
    limits: Any = {"max_tokens": ppo.max_answer_seq_len, "max_prompt_tokens": max_prompt_tokens}
    return ExperienceSettings(
        samples_per_prompt=ppo.num_samples_per_prompt,
        layout=layout,
        scoring=ScoringSettings(ppo.clip_reward, settings_of(LengthSettings, flags, **limits), rewards, scale),
        reading=ReadingSettings(
            ppo.temperature,
            bool(ppo.reuse_forwards) or reads_old_policy(algorithm, ppo),
            reuses_forwards=bool(ppo.reuse_forwards),
            learns_values=bool(ppo.reuse_values),
            with_entropy=bool(ppo.reuse_forwards) and flags.entropy_coef > 0,
            with_collisions=estimator.needs_policy or ppo.report_variance,
        ),
        kl=kl,
        estimator=estimator,
        advantage=AdvantageSettings(
            flags.gamma, flags.lam, flags.norm_adv_by_std, flags.norm_adv_over, own_options(estimator, flags)
        ),
        whiten_advantages=estimator.whitens if flags.whiten_advantages is None else flags.whiten_advantages,
        correction=algorithm.correction,
        reports_variance=ppo.report_variance,
    )


def reads_old_policy(algorithm: Algorithm, ppo: PpoArguments) -> bool:
    """Return whether something needs the actor's log-probabilities of before its step. Otherwise the actor takes one
    step on each rollout, and the old policy is the one that is trained."""
    bypasses, in_loss = algorithm.correction.bypasses, algorithm.flags.kl_in == "loss"
    return (
        (algorithm.wants_reference and not in_loss and (algorithm.kl_estimator.of_logits or not bypasses))
        or algorithm.correction.reads_old_policy
        or algorithm.estimator.needs_policy
        or ppo.report_variance
        or (not bypasses and (ppo.steps_per_rollout > 1 or algorithm.policy_loss.selects is not None))
    )


def learning_settings(algorithm: Algorithm, ppo: PpoArguments) -> LearningSettings:
    """Return the settings of part 7. A clip of one direction overrides that of both, which overrides the loss's own."""
    flags, policy_loss = algorithm.flags, algorithm.policy_loss

    def bound(one_way: float | None, own: float) -> float:
        return next(value for value in (one_way, flags.clip_range, own) if value is not None)

    low, high = bound(flags.clip_range_low, policy_loss.clip_low), bound(flags.clip_range_high, policy_loss.clip_high)
    return settings_of(
        LearningSettings,
        flags,
        policy_loss=policy_loss,
        policy=PolicyLossSettings(low, high, flags.dual_clip, own_options(policy_loss, flags)),
        aggregation=flags.loss_aggregation or policy_loss.aggregation,
    )
