"""Settings of step 3's loop, from flags, inputs and models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from training.step3_ppo import STEP
from training.step3_ppo.contracts.settings import DrawingSettings, EvaluationTimes, PpoSettings, UpdateSettings
from training.step3_ppo.flags.algorithm import experience_settings, learning_settings
from training.utils.base.console import log
from training.utils.contracts.rollout_engine import Ends, Sampling
from training.utils.flags.flags import settings_of
from training.utils.generation.decoding.drawn import tokens_of_words
from training.utils.layout.trie import SequenceLayout
from training.utils.loading.configurations import ScoreScale, read_score_scale
from training.utils.models.attention import plan_for
from training.utils.models.families import placeholder_id
from training.utils.models.flops import ComputeMeter, model_shape
from training.utils.rewards.weighted import Rewards
from training.utils.setup.media import kept_mb, media_kind
from training.utils.setup.setup import compute_meter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.step3_ppo.flags.arguments import PpoArguments
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.step3_ppo.flags.roles_arguments import RolesArguments
    from training.step3_ppo.parts.inputs import PpoOpening
    from training.step3_ppo.roles.roles import Roles
    from training.utils.contracts.run import StepObservers
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.layout.planner import PlanSettings


def loop_settings(opening: PpoOpening, roles: Roles, scale: ScoreScale | None, observers: StepObservers) -> PpoSettings:
    """Return the settings of the loop and its parts. A collective, which reads media and measures the matmul rate
    where that is asked for. scale: of `wanted_score_scale`"""
    flags, components, _, inputs, ranks = opening
    ppo, rollouts, sampling = flags.ppo, inputs.rollouts, _sampling(opening, roles.actor_model)
    plan = _plan(flags, roles.actor_model, roles.packs, ranks)
    plan = replace(plan, form=None if sampling.form is None else sampling.form.layout)
    media = with_kept_media(inputs.media, kept_mb(inputs.media, flags.added), roles, log)
    experience = experience_settings(
        components.algorithm,
        ppo,
        SequenceLayout(plan, sampling.pad_token_id, ranks.rank, media, ranks.sharing.size),
        _rewards(opening),
        scale=scale,
        max_prompt_tokens=flags.data.rows.max_prompt_seq_len,
    )
    slow = experience.kl.control.slow_warning(rollouts * ppo.sequences_per_rollout * ranks.world_size)
    if slow is not None:
        log(slow, ranks.is_main)
    return PpoSettings(
        rollouts,
        flags.run.seed,
        drawing=DrawingSettings(
            sampling,
            ppo.per_device_generation_batch_size,
            ppo.generation_batches,
            flags.algorithm.dynamic_sampling_tries,
        ),
        experience=experience,
        updates=UpdateSettings(
            learning_settings(components.algorithm, ppo),
            ppo.sequences_per_minibatch,
            ppo.ppo_epochs,
            flags.algorithm.critic_warmup,
            flags.algorithm.stop_update_kl,
            _meters(roles, ranks) if ppo.report_mfu and rollouts else (),
        ),
        evaluation=settings_of(
            EvaluationTimes,
            ppo,
            evaluates_first=ppo.val_before_train or ppo.val_only,
            rollouts_per_epoch=inputs.data.steps_per_epoch,
        ),
        stop_kl=flags.algorithm.stop_kl,
        step_observers=observers,
        log_pace=flags.reporting.pace(),
        method=STEP.label_of(flags.settings),
    )


def _sampling(opening: PpoOpening, model: PreTrainedModel) -> Sampling:
    """Return the settings of the drawing of responses."""
    flags, inputs, tokenizer = opening.flags, opening.inputs, opening.tokenizers.actor
    ppo, (end, *more_ends) = flags.ppo, inputs.end_token_ids
    # The token that stands for a medium, where prompts have some, would be one without content in a response.
    unwritten = () if inputs.media is None else ((placeholder_id(model.config),),)
    return settings_of(
        Sampling,
        ppo,
        max_new_tokens=ppo.max_answer_seq_len,
        end_token_id=end,
        pad_token_id=tokenizer.pad_token_id,
        bad_words=(*tokens_of_words(ppo.bad_words, tokenizer, end), *unwritten),
        ends=Ends(tuple(ppo.stop), tuple(more_ends)),
        form=flags.data.opened_form(tokenizer),
    )


def _rewards(opening: PpoOpening) -> Rewards:
    """Return the rewards of a response, and texts of a rollout for those that are functions."""
    inputs, tokenizer = opening.inputs, opening.tokenizers.actor
    return Rewards(
        named=opening.components.rewards,
        timeout_seconds=opening.flags.reward.reward_timeout,
        columns=tuple(inputs.columns),
        texts_of=lambda rollout: rollout.texts(tokenizer.decode, inputs.end_token_ids),
        turns_of=lambda rollout: rollout.turn_texts(tokenizer.decode, inputs.end_token_ids),
        media_of=None if inputs.seen is None else partial(media_kind().for_rewards, inputs.seen),
        combination=opening.flags.reward.combination,
    )


def _plan(flags: PpoFlags, actor: PreTrainedModel, packed: bool, ranks: Ranks) -> PlanSettings:
    """The layout of sequences over all ranks."""
    ppo, longest, rows = flags.ppo, flags.longest_tokens, flags.ppo.per_device_training_batch_size
    plan = plan_for(
        actor,
        rows,
        longest,
        packed=packed,
        ranks=ranks.world_size,
        max_tokens_per_micro_batch=ppo.max_tokens_per_micro_batch,
        keeps_small=flags.guests.keep_forwards_small(actor, ranks.device.type == "cpu", ranks.sharing.size),
    )
    return replace(plan, least_shared_tokens=ppo.share_beginnings)


def _meters(roles: Roles, ranks: Ranks) -> tuple[ComputeMeter, ...]:
    """Meters of the actor and of the critic, if there is one. A collective."""
    actor = compute_meter(roles.actor_model, ranks)
    if roles.critic_model is None:
        return (actor,)
    return actor, ComputeMeter(model_shape(roles.critic_model), actor.peak_flops_per_second)


def wanted_score_scale(roles: RolesArguments, ppo: PpoArguments) -> ScoreScale | None:
    """The scale of --normalize_reward_scores, read before a model loads; None without the flag."""
    if not ppo.normalize_reward_scores:
        return None
    return read_score_scale(roles.critic_model_name_or_path, "--normalize_reward_scores")


def with_kept_media(media: Any, most_mb: int, roles: Roles, log: Callable[..., None]) -> Any:
    """Return the prompts' media, or None, with up to `most_mb` MiB of what the actor makes of them stored, for all
    forwards: the rollout's prompts, the reading of a rollout, and its updates."""
    if not most_mb or media is None:
        return media
    names, readers = ("actor", "reference", "critic", "reward model"), roles.readers
    with roles.reading():
        those = {name: readers[name] for name in names if name in readers}
        return media_kind().kept_for_readers(media, most_mb, roles.actor, those, log=log)
