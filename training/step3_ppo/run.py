"""A run of step 3, from checked flags to its saved models: prompts, models, settings, rollout engine, the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.step3_ppo import STEP
from training.step3_ppo.contracts.rollouts import RolloutEvents
from training.step3_ppo.flags.checks import check_beside_media, check_models
from training.step3_ppo.flags.rollout_choices import source_of
from training.step3_ppo.learning.learning import Updates
from training.step3_ppo.parts.assembly import open_roles, open_rollout_engine, settled
from training.step3_ppo.parts.evaluation import Evaluator, HeldOut, closing_sentence
from training.step3_ppo.parts.inputs import PpoOpening, load_inputs, load_tokenizers, share_style
from training.step3_ppo.parts.settings import loop_settings, wanted_score_scale
from training.step3_ppo.trainer import PpoTrainer
from training.utils.base.console import log
from training.utils.checkpoints.parts import CheckpointParts
from training.utils.data.chat.style import adopt_style
from training.utils.loading.tokenizers import tokenizer_digest
from training.utils.rewards.table import RunPlace, open_rules
from training.utils.run.run_folder import ROLLOUTS
from training.utils.setup.opened_run import open_run
from training.utils.setup.setup import least_free_bytes

if TYPE_CHECKING:
    from training.step3_ppo.flags.checks import Components
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.utils.loading.configurations import ScoreScale
    from training.utils.setup.opened_run import OpenedRun


def run(flags: PpoFlags, components: Components) -> None:
    """Load prompts and models, train, save."""
    shares_gpu = components.rollout_engine.frees_gpu_memory(flags.settings_of_engine(components.rollout_engine))
    with open_run(STEP, flags, flags.settings, trains=not flags.ppo.val_only, shares_gpu=shares_gpu) as opened:
        opening, scale = open_inputs(opened, components)
        free_bytes, roles = least_free_bytes(opening.ranks), open_roles(opening, opened.settings["head_chunk_mb"])
        opening = settled(opened, opening, roles, free_bytes)
        flags, _, tokenizers, inputs, ranks = opening
        settings = loop_settings(opening, roles, scale, opened.step_observers(flags.data.chat, tokenizers.actor))
        engine = open_rollout_engine(opening, roles)
        parts = CheckpointParts(roles.trained, ranks, roles.actor_guests.other_weights, *roles.saved)
        held_out = HeldOut.of_run(inputs, flags.ppo, are_replayed=not source_of(flags).draws)
        place = RunPlace(opened.folder.path, ranks.rank, ranks.world_size, tokenizer_digest(tokenizers.actor))
        open_rules(components.rules.values(), flags.reward.reward_replay, place)
        loaded = ("actor", "critic") if components.with_critic_tokenizer else ("actor",)
        read_again = {f"{role}_model_name_or_path": flags.model(role).name_or_path for role in loaded}
        batch = flags.ppo.per_device_eval_batch_size
        observer = opened.evaluation_observers(roles.whole_actor, tokenizers.actor, batch=batch)
        with opened.recorded(parts, inputs.data, read_again) as (metrics, checkpoints, bad_steps):
            scoring = (roles, engine, tokenizers.actor, components.checker)
            evaluator = Evaluator(*scoring, settings, held_out, metrics, opened.folder, observer)
            updates = Updates(roles, settings, inputs.beside, bad_steps)
            events = events_of_rollouts(opened, opening)
            loop = (settings, metrics, checkpoints, events, components.scheduler)
            result = PpoTrainer(roles, engine, inputs.train, updates, evaluator, *loop).train()
        summary = result.summary()
        closing = closing_sentence(summary, opened.folder, flags.ppo.val_only) + result.signs
        opened.finish(parts, roles.actor_guests, {"summary.json": summary}, closing)


def open_inputs(opened: OpenedRun, components: Components) -> tuple[PpoOpening, ScoreScale | None]:
    """Open the tokenizers and the prompts, checked before a model loads, and start the run; return them with the scale
    of --normalize_reward_scores. A collective."""
    flags: PpoFlags = opened.flags
    ranks = opened.ranks
    check_models(flags, components.with_critic_tokenizer)
    tokenizers = load_tokenizers(flags, components.with_critic_tokenizer)
    flags.guests.check_words(tokenizers.actor)
    style = adopt_style(tokenizers.actor, flags.data.chat, opened.plan.began_with("prompt_style"))
    log(style.sentence, ranks.is_main and not style.is_open)
    opened.start(style.chat.prompt_style, flags.model("actor").name_or_path)
    scale = wanted_score_scale(flags.roles, flags.ppo)
    inputs = load_inputs(flags, components, tokenizers.actor, ranks, style=style)
    opened.decide({"prompt_style": share_style(tokenizers, flags.data.chat, ranks)})
    check_beside_media(flags, components, inputs.media)
    if components.scheduler is not None:
        components.scheduler.check_run(
            components.rollout_engine,
            inputs.media,
            rollouts=inputs.rollouts,
            prompts_of_step=flags.ppo.prompts_of_step(ranks.world_size),
            ranks=ranks.world_size,
        )
    return PpoOpening(flags, components, tokenizers, inputs, ranks), scale


def events_of_rollouts(opened: OpenedRun, opening: PpoOpening) -> RolloutEvents | None:
    """Return the log of the rollouts; None where scores choose the prompts, so that there are no epochs."""
    flags, ranks = opening.flags, opening.ranks
    if flags.prompt_source or flags.algorithm.dynamic_sampling_tries:
        return None
    log_or_none, prompts = opened.folder.run_log(ROLLOUTS) if ranks.is_main else None, len(opening.inputs.train.prompts)
    return RolloutEvents(log_or_none, flags.ppo.rollout_engine, prompts, flags.ppo.prompts_of_step(ranks.world_size))
