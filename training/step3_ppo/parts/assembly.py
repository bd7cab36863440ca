"""Opens the models of a run and its rollout engine, checked before the first step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from training.step3_ppo.parts.acting import deciding_flags, engine_of_rows
from training.step3_ppo.parts.replay import make_engine
from training.step3_ppo.roles.loading import RolesNeeded, load_roles
from training.utils.base.console import log
from training.utils.base.errors import ThreestepError
from training.utils.contracts.guessers import BY_HEAD
from training.utils.contracts.guests import Guests
from training.utils.contracts.rollout_engine import Drawing
from training.utils.loading.models import check_no_dropout
from training.utils.models.layout_check import check_padded
from training.utils.models.own_forward import own_forward_of
from training.utils.models.stop_tokens import set_stop_tokens
from training.utils.setup.setup import may_pack

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from training.step3_ppo.flags.checks import Components
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.step3_ppo.parts.inputs import Inputs
    from training.step3_ppo.roles.roles import Roles, Tokenizers
    from training.utils.contracts.rollout_engine import Decode, RolloutEngine
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.setup.guests import GuestSettings


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
    for sentence in engine.check(roles.whole_actor.lent(), own, Drawing(paths=flags.data.chat.parallel_thinking)):
        log(sentence, ranks.is_main)
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
    kind = components.rollout_engine
    engine = kind.create(decode, flags.settings_of_engine(kind))
    if components.speculation is not None:
        ranks, borrow_head = roles.actor.ranks, None
        if components.speculation.by == BY_HEAD:
            borrow_head = roles.actor_guests.lent_guesser(roles.actor_model, flags.run.seed)
            assert borrow_head is not None, "checked with the flags"
        engine.enable_speculation(components.speculation, borrow_head, lambda sentence: log(sentence, ranks.is_main))
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
        replace(flags.roles, head_chunk_mb=head_chunk_mb),  # type: ignore[call-arg]
        tokenizers,
        ranks,
        optimizer_steps,
        warmup_steps,
        flags.longest_tokens,
        RolesNeeded(algorithm.estimator.needs_critic, algorithm.wants_reference, components.with_reward_model),
        inputs.media,
    )
    return with_guests(
        checked_roles(flags, roles),
        flags.guests,
        path=flags.roles.actor_model_name_or_path,
        total_steps=optimizer_steps - warmup_steps,
        seed=flags.run.seed,
        reuses_forwards=flags.ppo.reuse_forwards,
    )


def checked_roles(flags: PpoFlags, roles: Roles) -> Roles:
    """Check what every model reads against its own forward, before a checkpoint changes the weights; return the roles
    with `packs` known. A collective."""
    readers = roles.readers
    if "reference" in readers:
        check_padded(roles.actor_model, readers.pop("reference")[1], roles.actor.ranks.device)
    data, head = flags.data.chat.needs_segments, flags.guests.needs_segments
    packs = []
    for name, (model, read) in readers.items():
        engine = roles.critic if name == "critic" and roles.critic is not None else roles.actor
        needed = data or (head if name == "actor" else None)
        packs.append(
            may_pack(
                flags.ppo.padded,
                model,
                engine,
                read,
                longest_tokens=flags.longest_tokens,
                log=log,
                needs_segments=needed,
            )
        )
    if flags.ppo.reuse_forwards:
        check_reusable(roles)
    return replace(roles, packs=all(packs))


def with_guests(
    roles: Roles, settings: GuestSettings, *, path: str, total_steps: int, seed: int, reuses_forwards: bool = False
) -> Roles:
    """Return the roles with what trains beside them. A collective. path: of the actor; total_steps: of its optimizer.

    reuses_forwards: ThreestepError if a guest cannot learn from forwards before the step
    """
    models = [(roles.actor, roles.actor_model)]
    if roles.critic is not None and roles.critic_model is not None:
        models.append((roles.critic, roles.critic_model))
    actor, critic = (*settings.open(models, path, total_steps, seed), Guests())[:2]
    for guest in (*actor, *critic):
        if reuses_forwards and guest.why_not_ahead:
            raise ThreestepError(
                f"--reuse_forwards learns from the forwards that read, and {guest.why_not_ahead}, or leave "
                "--reuse_forwards out"
            )
    return replace(roles, actor_guests=actor, critic_guests=critic)


def check_reusable(roles: Roles) -> None:
    """ThreestepError if the forwards that read, in train mode where they also learn, would have dropout: by whatever
    name, the model's own too."""
    for role, model in (("actor", roles.actor_model), ("critic", roles.critic_model)):
        if model is not None:
            instead = f"give --{role}_dropout 0, or leave --reuse_forwards out"
            check_no_dropout(model, "and --reuse_forwards reads in it", instead)
