"""Makes what the trainer works with besides data; saves the models at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from training.step3_ppo.contracts.settings import PpoSettings
from training.step3_ppo.flags.algorithm import experience_settings, learning_settings
from training.step3_ppo.parts.acting import deciding_flags, engine_of_rows
from training.step3_ppo.parts.evaluation import Evaluator, PpoResult, closing_sentence
from training.step3_ppo.parts.kept_pictures import with_kept_pictures
from training.step3_ppo.parts.replay import make_engine
from training.utils.base.console import log
from training.utils.base.errors import ThreestepError
from training.utils.contracts.guessers import BY_HEAD
from training.utils.contracts.rollout_engine import Decode, PathSampling, RolloutEngine, Sampling
from training.utils.data.build.parallel_thinking import parallel_tags
from training.utils.data.files.digests import digest_files
from training.utils.flags.flags import settings_of
from training.utils.generation.decoding.bad_words import tokens_of_words
from training.utils.loading.configurations import model_files
from training.utils.loading.models import check_no_dropout
from training.utils.loading.score_scale import ScoreScale, read_score_scale
from training.utils.models.adapters.saving import save_model
from training.utils.models.attention.attention import plan_for
from training.utils.models.families.parts import placeholder_id
from training.utils.models.families.processors import write_beside
from training.utils.models.flops import ComputeMeter, model_shape
from training.utils.models.layout_check import check_padded
from training.utils.models.own_forward import own_forward_of
from training.utils.models.stop_tokens import set_stop_tokens
from training.utils.mtp.head import new_head
from training.utils.mtp.lending import WholeHead
from training.utils.mtp.opening import head_writer, open_head
from training.utils.opening.saving_check import SavedModel, check_saving
from training.utils.opening.setup import compute_meter, may_pack
from training.utils.outputs.final_models import FinalModels
from training.utils.report.writing import close_run
from training.utils.rewards.weighted import Rewards
from training.utils.routers.routers import has_routers
from training.utils.routers.step_loss import RouterLoss, router_loss

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.step3_ppo.flags.arguments import PpoArguments
    from training.step3_ppo.flags.checks import Components
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.step3_ppo.flags.roles_arguments import RolesArguments
    from training.step3_ppo.parts.inputs import Inputs
    from training.step3_ppo.roles.roles import Roles, Tokenizers
    from training.utils.contracts.token_rows import TokenRows
    from training.utils.data.chat.arguments import ChatArguments
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.layout.planner import PlanSettings
    from training.utils.run.run_folder import RunFolder


def make_parts(
    flags: PpoFlags,
    components: Components,
    inputs: Inputs,
    roles: Roles,
    tokenizer: PreTrainedTokenizerBase,
    scale: ScoreScale | None,
) -> tuple[RolloutEngine, Callable[..., Evaluator], PpoSettings]:
    """Return the rollout engine, what makes the evaluator (of `metrics` and `folder`), and the settings. A collective,
    before a checkpoint changes the weights: the engine is checked against the actor's own forward."""
    ppo, ranks = flags.ppo, roles.actor.ranks
    plan = _plan(ppo, flags.longest_tokens, roles.actor_model, roles.packs, ranks.world_size)
    paths = _path_sampling(ppo, flags.data.chat, tokenizer)
    plan = replace(plan, tags=None if paths is None else paths.tags)
    sampling = settings_of(
        Sampling,
        ppo,
        max_new_tokens=ppo.max_answer_seq_len,
        end_token_id=inputs.end_token_ids[0],
        more_end_token_ids=inputs.end_token_ids[1:],
        pad_token_id=tokenizer.pad_token_id,
        bad_words=(
            *tokens_of_words(ppo.bad_words, tokenizer, inputs.end_token_ids[0]),
            *_unwritten(inputs, roles.actor_model),
        ),
        stop=tuple(ppo.stop),
        paths=paths,
    )
    rewards = Rewards(
        named=components.rewards,
        timeout_seconds=flags.reward.reward_timeout,
        columns=tuple(inputs.columns),
        texts_of=lambda rollout: rollout.texts(tokenizer.decode, inputs.end_token_ids),
        turns_of=lambda rollout: rollout.turn_texts(tokenizer.decode, inputs.end_token_ids),
        media_of=inputs.media_of,
    )
    experience = experience_settings(
        components.algorithm, ppo, scale, plan, tokenizer.pad_token_id, rewards, ranks.rank
    )
    longest_prompt = flags.data.rows.max_prompt_seq_len
    settings = settings_of(
        PpoSettings,
        ppo,
        total_rollouts=inputs.total_rollouts,
        rollouts_per_epoch=inputs.rollouts_per_epoch,
        prompts_per_batch=ppo.per_device_generation_batch_size,
        critic_warmup=flags.algorithm.critic_warmup,
        dynamic_sampling_tries=flags.algorithm.dynamic_sampling_tries,
        seed=flags.run.seed,
        sampling=sampling,
        experience=replace(
            experience,
            length=replace(experience.length, max_prompt_tokens=longest_prompt),
            media=with_kept_pictures(inputs.media, flags.roles.kept_image_features_mb, roles, log),
        ),
        learning=learning_settings(components.algorithm, ppo),
        evaluates_first=ppo.val_before_train or ppo.val_only,
        stop_kl=flags.algorithm.stop_kl,
        stop_update_kl=flags.algorithm.stop_update_kl,
        meters=_meters(roles, ranks) if ppo.report_mfu and inputs.total_rollouts else (),
        traces=flags.run.traces(),
        log_pace=flags.reporting.pace(),
    )
    slow = experience.kl.control.slow_warning(inputs.total_rollouts * ppo.sequences_per_rollout * ranks.world_size)
    if slow is not None:
        log(slow, ranks.is_main)
    engine = make_engine(
        partial(_engine, flags=flags, components=components, roles=roles, tokenizer=tokenizer, inputs=inputs),
        lambda ids: str(tokenizer.decode(list(ids))),
        ppo.rollout_dump,
        ppo.rollout_replay,
        ranks.rank,
        deciding_flags(flags),
    )
    own = own_forward_of(roles.actor_model)
    assert own is not None, "it is read when it is loaded"
    set_stop_tokens(roles.actor_model, tokenizer, inputs.end_token_ids)
    for sentence in engine.check(roles.whole_actor.lent(), own):
        log(sentence, ranks.is_main)
    if paths is not None:
        engine.check_paths(roles.whole_actor.lent())
    evaluator = partial(
        Evaluator,
        roles=roles,
        rollout_engine=engine,
        prompts=inputs.eval,
        pixels=inputs.pixels,
        tokenizer=tokenizer,
        checker=components.checker,
        settings=settings,
        prompts_per_batch=ppo.per_device_eval_batch_size,
        samples_per_prompt=ppo.val_samples,
        with_greedy=ppo.val_greedy,
        shown=ppo.show_samples,
    )
    return engine, evaluator, settings


def _unwritten(inputs: Inputs, model: PreTrainedModel) -> tuple[tuple[int, ...], ...]:
    """The token that stands for images, where prompts have some: in a response it would be an image without pixels."""
    return () if inputs.media is None else ((placeholder_id(model.config),),)


def _engine(
    decode: Decode | None,
    flags: PpoFlags,
    components: Components,
    roles: Roles,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Inputs,
) -> RolloutEngine:
    """What draws, by guesses if they are asked for, and with environments if there are any."""
    engine = components.rollout_engine.create(decode, longest_tokens=flags.longest_tokens, vllm=flags.vllm)
    if components.speculation is not None:
        layers, ranks, lent_head = roles.mtp.depths, roles.actor.ranks, None
        if components.speculation.by == BY_HEAD:
            assert roles.mtp.head is not None, "checked with the flags"
            lent_head = WholeHead(roles.mtp.head, partial(new_head, roles.actor_model, layers, flags.run.seed)).lent
        engine.speculate(components.speculation, lent_head, lambda sentence: log(sentence, ranks.is_main))
    if components.environments is None:
        return engine
    return engine_of_rows(engine, components.environments, flags, tokenizer, inputs.end_token_ids)


def checked_roles(flags: PpoFlags, roles: Roles) -> Roles:
    """Check what every model reads against its own forward, before a checkpoint changes the weights; return the roles
    with `packs` known. A collective."""
    read: list[tuple[PreTrainedModel, TrainingEngine, Callable[[TokenRows], torch.Tensor]]]
    read = [(roles.actor_model, roles.actor, lambda rows: roles.actor(rows).logprobs_M)]
    if roles.scorer is not None and roles.reward_model is not None:
        read.append((roles.scorer, roles.actor, roles.reward_model))
    if roles.critic_model is not None and roles.critic is not None:
        read.append((roles.critic_model, roles.critic, roles.critic))
    if roles.reference is not None and roles.reference.frozen is not None:
        frozen = roles.reference.frozen
        check_padded(roles.actor_model, lambda rows: frozen(rows, 1.0).logprobs_M, roles.actor.ranks.device)
    longest = flags.longest_tokens
    data, head = flags.data.chat.needs_segments, flags.mtp.settings().needs_segments
    needs = [data or (head if model is roles.actor_model else None) for model, _, _ in read]
    packs = [
        may_pack(flags.ppo.padded, model, engine, forward, longest, log, needs_segments=needed)
        for (model, engine, forward), needed in zip(read, needs, strict=True)
    ]
    if flags.ppo.reuse_forwards:
        check_reusable(roles)
    roles = balanced_roles(roles, flags.roles.router_aux_loss_coef, flags.ppo.reuse_forwards)
    return replace(roles, packs=all(packs))


def with_head(roles: Roles, flags: PpoFlags, total_steps: int) -> Roles:
    """Return the roles with the head for multi-token prediction that the flags ask for. A collective.
    total_steps: of the actor's optimizer."""
    path, seed = flags.roles.actor_model_name_or_path, flags.run.seed
    return replace(roles, mtp=open_head(flags.mtp.settings(), path, roles.actor, roles.actor_model, total_steps, seed))


def balanced_roles(roles: Roles, coefficient: float | None, reuses_forwards: bool) -> Roles:
    """Return the roles with the balancing losses of their routers.

    coefficient: of both; None takes each model's own
    reuses_forwards: ThreestepError if there is a loss: the whole step's load has to be known before its first backward

    Raises ThreestepError for a coefficient where there is nothing to balance.
    """
    models = [model for model in (roles.actor_model, roles.critic_model) if model is not None]
    is_mixture = any(has_routers(model) for model in models)

    def balanced(engine: TrainingEngine | None, model: PreTrainedModel | None) -> RouterLoss:
        if engine is None or model is None:
            return RouterLoss()
        # The coefficient is for the one of the two that has routers, or for both.
        is_for_it = has_routers(model) or not is_mixture
        return router_loss(engine, model, coefficient if is_for_it else None)

    actor, critic = balanced(roles.actor, roles.actor_model), balanced(roles.critic, roles.critic_model)
    if reuses_forwards and (actor.routed is not None or critic.routed is not None):
        raise ThreestepError(
            "--reuse_forwards learns from the forwards that read, and the balancing loss of the routers needs the "
            "load of the whole step before; give --router_aux_loss_coef 0, or leave --reuse_forwards out"
        )
    return replace(roles, actor_routers=actor, critic_routers=critic)


def check_reusable(roles: Roles) -> None:
    """ThreestepError if the forwards that read, in train mode where they also learn, would have dropout: by whatever
    name, the model's own too."""
    for role, model in (("actor", roles.actor_model), ("critic", roles.critic_model)):
        if model is not None:
            instead = f"give --{role}_dropout 0, or leave --reuse_forwards out"
            check_no_dropout(model, "and --reuse_forwards reads in it", instead)


def _plan(ppo: PpoArguments, longest_tokens: int, model: PreTrainedModel, packed: bool, ranks: int) -> PlanSettings:
    """How sequences are laid out over all ranks."""
    rows, most = ppo.per_device_training_batch_size, ppo.max_tokens_per_micro_batch
    plan = plan_for(model, rows, longest_tokens, packed=packed, ranks=ranks, max_tokens_per_micro_batch=most)
    return replace(
        plan,
        least_micro_batches=ppo.least_micro_batches,
        micro_batches_multiple_of=ppo.micro_batches_multiple_of,
        least_shared_tokens=ppo.share_beginnings,
    )


def _path_sampling(ppo: PpoArguments, chat: ChatArguments, tokenizer: PreTrainedTokenizerBase) -> PathSampling | None:
    """How blocks are drawn; None without --parallel_thinking."""
    tags = parallel_tags(chat, tokenizer)
    if tags is None:
        return None
    return PathSampling(tags, ppo.paths_of_a_block, ppo.max_path_tokens)


def _meters(roles: Roles, ranks: Ranks) -> tuple[ComputeMeter, ...]:
    """Of the actor and, if any, of the critic. A collective."""
    actor = compute_meter(roles.actor_model, ranks)
    if roles.critic_model is None:
        return (actor,)
    return actor, ComputeMeter(model_shape(roles.critic_model), actor.peak_flops_per_second)


def start_digests(roles: RolesArguments, components: Components, cache_dir: str) -> dict[str, Callable[[], str]]:
    """By flag, what digests the models that a run loads at each start: the actor's is the reference too, the critic's
    the reward model."""
    paths = {"actor_model_name_or_path": roles.actor_model_name_or_path}
    if components.with_critic_tokenizer:
        paths["critic_model_name_or_path"] = roles.critic_model_name_or_path
    return {flag: partial(digest_files, model_files(path), cache_dir) for flag, path in paths.items()}


def wanted_score_scale(roles: RolesArguments, ppo: PpoArguments) -> ScoreScale | None:
    """The scale of --normalize_reward_scores, read before a model loads; None without the flag."""
    if not ppo.normalize_reward_scores:
        return None
    return read_score_scale(roles.critic_model_name_or_path, "--normalize_reward_scores")


def check_roles_saving(roles: Roles, tokenizers: Tokenizers, folder: RunFolder, flags: PpoFlags) -> None:
    """ThreestepError if what `save_roles` will write could not be saved or loaded again. A collective."""
    if flags.ppo.val_only:
        return
    saved = [SavedModel(roles.actor_model, tokenizers.actor)]
    tokenizer = tokenizers.saved_with(roles.shares_trunk)["critic"]
    if roles.critic_model is not None and tokenizer is not None:
        saved.append(SavedModel(roles.critic_model, tokenizer))
    ranks = roles.actor.ranks
    check_saving(folder.path, saved, roles.processor, flags.roles.trust_remote_code, ranks.is_main)


def save_roles(roles: Roles, tokenizers: Tokenizers, final: FinalModels) -> None:
    """Write model/ and, where they exist, critic/ and model_ema/. A collective, and the last use of the models: the
    average takes the place of the actor's weights."""
    for name, engine, model, tokenizer in (
        ("model", roles.actor, roles.actor_model, tokenizers.actor),
        ("critic", roles.critic, roles.critic_model, tokenizers.saved_with(roles.shares_trunk)["critic"]),
        ("model_ema", roles.actor if roles.average else None, roles.actor_model, tokenizers.actor),
    ):
        if name == "model_ema" and roles.average is not None:
            roles.average.put_in_place()
        if engine is not None and model is not None and tokenizer is not None:
            tensors, write_head = engine.full_state(model), head_writer(roles.mtp) if name == "model" else None
            beside = partial(write_beside, write_head, roles.processor)
            save = partial(save_model, model=model, tensors=tensors, tokenizer=tokenizer, write_more=beside)
            final.write(name, save)


def finish(
    flags: PpoFlags,
    settings: dict[str, Any],
    roles: Roles,
    tokenizers: Tokenizers,
    folder: RunFolder,
    result: PpoResult,
) -> None:
    """Write the models, and then all else that a run leaves; say what it reached. A collective. ThreestepError if a
    model is not where it belongs."""
    summary = result.summary()
    final = FinalModels(folder.path, flags.saving, roles.actor.ranks)
    if not flags.ppo.val_only:
        save_roles(roles, tokenizers, final)
    folder.write_figures("summary.json", summary)
    close_run(folder, settings, not flags.ppo.val_only)
    final.check()
    log(closing_sentence(summary, folder, flags.ppo.val_only) + result.signs, folder.is_main_rank)
