"""A run of step 3, from checked flags to its saved models: prompts, models, settings, rollout engine, the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.step3_ppo import STEP
from training.step3_ppo.ahead.admission import Admission
from training.step3_ppo.ahead.events import RolloutEvents
from training.step3_ppo.ahead.schedule import read_schedule
from training.step3_ppo.flags.ahead_checks import check_ahead_of_run
from training.step3_ppo.flags.checks import check_beside_media, check_models
from training.step3_ppo.learning.learning import Updates
from training.step3_ppo.parts.assembly import open_roles, open_rollout_engine
from training.step3_ppo.parts.evaluation import Evaluator, HeldOut, closing_sentence
from training.step3_ppo.parts.inputs import PpoOpening, load_inputs, load_tokenizers, share_style
from training.step3_ppo.parts.settings import loop_settings, wanted_score_scale
from training.step3_ppo.trainer import PpoTrainer
from training.utils.base.console import log
from training.utils.checkpoints.parts import CheckpointParts
from training.utils.data.chat.chat import adopt_style
from training.utils.flags.arguments import resolved_settings
from training.utils.loading.tokenizers import tokenizer_digest
from training.utils.rewards.asking.service import RunPlace
from training.utils.rewards.weighted import open_asked
from training.utils.run.run_folder import ROLLOUTS
from training.utils.setup.flags import RunFlags
from training.utils.setup.opened_run import planned_run, start_digests

if TYPE_CHECKING:
    from training.step3_ppo.flags.checks import Components
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.utils.run.run_folder import RunFolder


def run(flags: PpoFlags, components: Components) -> None:
    """Load prompts and models, train, save."""
    ppo, trains = flags.ppo, not flags.ppo.val_only
    shares_gpu = components.rollout_engine.frees_gpu_memory(flags.settings_of_engine(components.rollout_engine))
    of_run = RunFlags(STEP, flags.run, flags.saving, flags.faults, flags.data, resolved_settings(flags), trains)
    with planned_run(of_run, shares_gpu) as planned:
        ranks, flags = planned.ranks, flags._replace(data=planned.flags.data)
        check_models(flags, components.with_critic_tokenizer)
        tokenizers = load_tokenizers(flags, components.with_critic_tokenizer)
        tokenizer = tokenizers.actor
        flags.guests.check_words(tokenizer)
        style = adopt_style(tokenizer, flags.data.chat, planned.plan.began_with("prompt_style"))
        log(style.sentence, ranks.is_main and not style.is_open)
        opened = planned.opened(style.chat.prompt_style, flags.roles.model("actor"), flags.roles.dtype)
        scale = wanted_score_scale(flags.roles, ppo)
        environments, rewards, rules = components.environments, components.rewards, components.rules
        inputs = load_inputs(
            flags, tokenizer, ranks, log, style=style, environments=environments, rewards=rewards, rules=rules
        )
        opened = opened.styled(share_style(tokenizers, flags.data.chat, ranks))
        check_beside_media(flags, components, inputs.media)
        check_ahead_of_run(
            flags,
            components.rollout_engine,
            inputs.media,
            rollouts=inputs.length.rollouts,
            ranks=ranks.world_size,
        )
        prompts_of_step = ppo.per_device_generation_batch_size * ppo.generation_batches * ranks.world_size
        if ppo.replay_schedule is not None:  # before a model loads
            read_schedule(ppo.replay_schedule, Admission(ppo.steps_ahead, prompts_of_step, inputs.length.rollouts))
        opening = PpoOpening(flags, components, tokenizers, inputs, ranks)
        roles = open_roles(opening, opened.model.head_chunk_mb)
        settings = loop_settings(opening, roles, scale)
        engine = open_rollout_engine(opening, roles)
        parts = CheckpointParts(roles.trained, ranks, roles.average, *roles.saved)
        read_again = ("actor", "critic") if components.with_critic_tokenizer else ("actor",)
        paths = {f"{role}_model_name_or_path": flags.roles.model(role).name_or_path for role in read_again}
        digests = start_digests(paths, flags.data.cache.cache_dir)
        held_out = HeldOut.of_run(inputs, ppo)
        place = RunPlace(opened.folder.path, ranks.rank, ranks.world_size, tokenizer_digest(tokenizer))
        open_asked(rules.values(), flags.reward.reward_replay, place)
        with opened.recorded(parts, inputs.data, digests) as (metrics, checkpoints, bad_steps):
            evaluator = Evaluator(
                roles, engine, tokenizer, components.checker, settings, held_out, metrics, opened.folder
            )
            updates = Updates(roles, settings, inputs.texts, bad_steps)
            events = _events(opening, opened.folder, prompts_of_step)
            trainer = PpoTrainer(
                roles, engine, inputs.train, updates, evaluator, settings, metrics, checkpoints, events
            )
            result = trainer.train()
        summary = result.summary()
        closing = closing_sentence(summary, opened.folder, ppo.val_only) + result.signs
        opened.finish(parts, roles.actor_guests, {"summary.json": summary}, closing)


def _events(opening: PpoOpening, folder: RunFolder, prompts_of_step: int) -> RolloutEvents | None:
    """Return the log of the rollouts; None where scores choose the prompts, so that there are no epochs."""
    flags, is_main = opening.flags, opening.ranks.is_main
    if flags.chooses_prompts:
        return None
    log_or_none = folder.run_log(ROLLOUTS) if is_main else None
    prompts = len(opening.inputs.train.prompts)
    return RolloutEvents(log_or_none, flags.ppo.rollout_engine, prompts, prompts_of_step)
