"""Opens the models of a run and its rollout engine, checked before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from training.step3_ppo.parts.acting import deciding_flags, engine_of_rows
from training.step3_ppo.parts.replay import make_engine
from training.step3_ppo.roles.loading import RolesNeeded, load_roles
from training.utils.base.console import log
from training.utils.base.errors import ThreestepError
from training.utils.contracts.guessers import BY_HEAD
from training.utils.data.files.digests import digest_files
from training.utils.loading.configurations import model_files
from training.utils.loading.models import check_no_dropout
from training.utils.models.layout_check import check_padded
from training.utils.models.own_forward import own_forward_of
from training.utils.models.stop_tokens import set_stop_tokens
from training.utils.mtp.head import new_head
from training.utils.mtp.lending import WholeHead
from training.utils.mtp.opening import open_head
from training.utils.opening.setup import may_pack
from training.utils.routers.routers import has_routers
from training.utils.routers.step_loss import RouterLoss, router_loss

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from training.step3_ppo.flags.checks import Components
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.step3_ppo.flags.roles_arguments import RolesArguments
    from training.step3_ppo.parts.inputs import Inputs
    from training.step3_ppo.roles.roles import Roles, Tokenizers
    from training.utils.contracts.rollout_engine import Decode, RolloutEngine
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.layout.rows import TokenRows


def open_rollout_engine(
    flags: PpoFlags, components: Components, inputs: Inputs, roles: Roles, tokenizer: PreTrainedTokenizerBase
) -> RolloutEngine:
    """Return what draws responses, checked against the actor's own forward. A collective, before a checkpoint changes
    the weights."""
    ppo, ranks = flags.ppo, roles.actor.ranks
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
    if flags.data.chat.parallel_thinking:
        engine.check_paths(roles.whole_actor.lent())
    return engine


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


def open_roles(
    flags: PpoFlags,
    components: Components,
    tokenizers: Tokenizers,
    inputs: Inputs,
    head_chunk_mb: int,
    ranks: Ranks,
) -> Roles:
    """Load the models that something needs, with what trains beside them, checked. A collective."""
    _, optimizer_steps, warmup_steps = inputs.length
    algorithm = components.algorithm
    roles = load_roles(
        replace(flags.roles, head_chunk_mb=head_chunk_mb),
        tokenizers,
        ranks,
        optimizer_steps,
        warmup_steps,
        flags.longest_tokens,
        RolesNeeded(algorithm.estimator.needs_critic, algorithm.wants_reference, components.with_reward_model),
        inputs.images,
    )
    return with_head(checked_roles(flags, roles), flags, optimizer_steps - warmup_steps)


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


def start_digests(roles: RolesArguments, components: Components, cache_dir: str) -> dict[str, Callable[[], str]]:
    """By flag, what digests the models that a run loads at each start: the actor's is the reference too, the critic's
    the reward model."""
    paths = {"actor_model_name_or_path": roles.actor_model_name_or_path}
    if components.with_critic_tokenizer:
        paths["critic_model_name_or_path"] = roles.critic_model_name_or_path
    return {flag: partial(digest_files, model_files(path), cache_dir) for flag, path in paths.items()}
