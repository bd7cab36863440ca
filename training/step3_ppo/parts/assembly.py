"""Open the models of a run and its rollout engine, check them before the first step, and settle the flags left to
`auto` once the models are loaded and before anything is generated."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from training.step3_ppo.flags.checks import ROLES, VALUES, chosen_by_flags, with_reuse
from training.step3_ppo.flags.rollout_choices import source_of
from training.step3_ppo.roles.roles import RolesNeeded, load_roles
from training.utils.base.console import log
from training.utils.base.errors import ThreestepError
from training.utils.base.machine import PlannedDevice
from training.utils.contracts.guests import Guests
from training.utils.contracts.rollout_engine import Drawing
from training.utils.flags.flags import AS_BEGUN, AutoChoice
from training.utils.models.dropout import check_no_dropout
from training.utils.models.layout_check import check_padded
from training.utils.models.own_forward import own_forward_of
from training.utils.models.stop_tokens import set_stop_tokens
from training.utils.setup.flags import CheckedStep, chosen_by_plugin
from training.utils.setup.setup import differs_in_training, may_pack

if TYPE_CHECKING:
    from training.step3_ppo.flags.arguments import PpoArguments
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.step3_ppo.parts.inputs import PpoOpening
    from training.step3_ppo.roles.roles import Roles
    from training.utils.contracts.rollout_engine import RolloutEngine
    from training.utils.generation.partners import Partners
    from training.utils.setup.guests import GuestFeatures
    from training.utils.setup.opened_run import OpenedRun


def open_rollout_engine(opening: PpoOpening, roles: Roles) -> RolloutEngine:
    """Return the rollout engine, checked against the actor's own forward. A collective, called before a checkpoint
    changes the weights."""
    flags, components, inputs, ranks = opening.flags, opening.components, opening.inputs, opening.ranks
    kind, tokenizer = components.rollout_engine, opening.tokenizers.actor

    def create() -> RolloutEngine:
        engine = kind.create(lambda ids: str(tokenizer.decode(list(ids))), flags.settings_of_engine(kind))
        if roles.experts is not None:
            engine.record_experts(roles.experts)
        if components.loop is not None:
            tell = partial(log, is_main_rank=ranks.is_main)
            engine.draw_by(components.loop.open(roles.actor_model, roles.actor_guests, flags.run.seed, tell))
        return components.partners.acting(
            engine,
            flags.data.chat,
            tokenizer,
            end_token_ids=inputs.end_token_ids,
            prompt_tokens=flags.data.rows.max_prompt_seq_len,
        )

    decides = deciding_settings(flags, components.partners)
    engine = source_of(flags).engine(create, rank=ranks.rank, decides=decides)
    own = own_forward_of(roles.actor_model)
    assert own is not None, "the model was measured when it was loaded"
    set_stop_tokens(roles.actor_model, tokenizer, inputs.end_token_ids)
    for sentence in engine.check(roles.whole_actor.lent(), own, Drawing(form=flags.data.form)):
        log(sentence, ranks.is_main)
    return engine


def deciding_settings(flags: PpoFlags, partners: Partners) -> dict[str, Any]:
    """Return the settings on which responses depend besides how they are drawn, by name; and whether experts are
    recorded, if they are."""
    return partners.decides | ({"experts": True} if flags.guests.records_experts else {})


def open_roles(opening: PpoOpening, head_chunk_mb: int) -> Roles:
    """Load and check the models that the run needs, with the guests that train beside them. A collective."""
    flags, components, inputs = opening.flags, opening.components, opening.inputs
    algorithm, steps = components.algorithm, flags.ppo.steps_per_rollout
    optimizer_steps, warmup_steps = inputs.rollouts * steps, flags.algorithm.critic_warmup * steps
    roles = load_roles(
        replace(flags.roles, head_chunk_mb=head_chunk_mb),  # type: ignore[call-arg]
        opening.tokenizers,
        opening.ranks,
        optimizer_steps,
        warmup_steps=warmup_steps,
        longest_tokens=flags.longest_tokens,
        needed=RolesNeeded(
            algorithm.estimator.needs_critic, algorithm.wants_reference, components.with_reward_model, flags.added
        ),
        media=inputs.media,
    )
    roles = checked_roles(flags, roles)
    with roles.reading():
        experts = flags.guests.recorded_experts(roles.actor_model, roles.readers["actor"][1], opening.ranks)
    roles = with_guests(
        replace(roles, experts=experts),
        flags.guests,
        path=flags.roles.actor_model_name_or_path,
        total_steps=optimizer_steps - warmup_steps,
        seed=flags.run.seed,
    )
    check_reused(flags.ppo, roles)
    return roles


def checked_roles(flags: PpoFlags, roles: Roles) -> Roles:
    """Check what every model reads against its own forward, before a checkpoint changes the weights; return the roles
    with `packs` known. A collective."""
    readers = roles.readers
    if "reference" in readers:
        check_padded(roles.actor_model, readers.pop("reference")[1], roles.actor.ranks.device)
    data, head = flags.data.needs_segments, flags.guests.needs_segments
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
    return replace(roles, packs=all(packs))


def with_guests(roles: Roles, features: GuestFeatures, *, path: str, total_steps: int, seed: int) -> Roles:
    """Return the roles with their guests. A collective. path: of the actor. total_steps: of its optimizer."""
    models = [(roles.actor, roles.actor_model)]
    if roles.critic is not None and roles.critic_model is not None:
        models.append((roles.critic, roles.critic_model))
    actor, critic = (*features.open(models, path, total_steps, seed), Guests())[:2]
    return replace(roles, actor_guests=actor, critic_guests=critic)


def check_reused(ppo: PpoArguments, roles: Roles) -> None:
    """ThreestepError if --reuse_forwards or --reuse_values is given and a role's forwards that read cannot also learn:
    in train mode they would have dropout, by whatever name, the model's own too; or a guest cannot learn ahead."""
    for name, role in ROLES.items():
        model, guests = roles.trained_with(role)
        if model is None or not getattr(ppo, name):
            continue
        check_no_dropout(model, f", which --{name} uses", f"set --{role}_dropout 0, or remove --{name}")
        for guest in guests:
            if guest.why_not_ahead:
                raise ThreestepError(
                    f"--{name} learns from earlier forward passes, but {guest.why_not_ahead}, or remove --{name}"
                )


def why_not_reused(roles: Roles, role: str) -> str | None:
    """Return why a role's forwards are not reused by default, with these models and their guests; None if nothing keeps
    it. Before a checkpoint changes the weights. A collective."""
    model, guests = roles.trained_with(role)
    for guest in guests:
        if guest.why_not_ahead:
            return guest.why_not_ahead.partition(";")[0]
    if model is not None and differs_in_training(model, roles.actor.ranks):
        return f"the {role} computes different outputs in train mode, as with dropout"
    return None


def settled(opened: OpenedRun, opening: PpoOpening, roles: Roles, free_bytes: int) -> PpoOpening:
    """Make the choices, by what all ranks know; return the opening with them. free_bytes: of the rank that has the
    least, before the models were loaded. A collective."""
    flags, choices = opening.flags, list[AutoChoice]()
    for name, role in ROLES.items():
        if getattr(flags.ppo, name) is None and not flags.ppo.val_only:
            choice = _reuse(name, opened, opening, free_bytes)
            if choice.value and (why := why_not_reused(roles, role)) is not None:
                choice = AutoChoice(name, False, why)
            choices.append(choice)
            opening = opening._replace(flags=with_reuse(opening.flags, choice))
    if opening.components.loop is not None:
        choices += opening.components.loop.choices()
    opened.settle(choices)
    return opening


def _reuse(name: str, opened: OpenedRun, opening: PpoOpening, free_bytes: int) -> AutoChoice:
    """Return the choice whatever the models are. A resumed run keeps what it began with, wherever it still can. name:
    FORWARDS or VALUES."""
    flags, components = opening.flags, opening.components
    if (media := opening.inputs.media) is not None:
        return AutoChoice(name, False, f"prompts have {media.name}")
    begun = opened.plan.began_with(name)
    if begun is False:
        return AutoChoice(name, False, AS_BEGUN)
    choice = chosen_by_flags(name, flags, components.algorithm)
    if begun:
        return AutoChoice(name, choice.value, AS_BEGUN if choice.value else choice.why)
    if name == VALUES or not choice.value:
        return choice
    device = PlannedDevice(opening.ranks.device.type == "cuda", free_bytes)
    found = chosen_by_plugin(name, CheckedStep(flags, components=components), device)
    return found or AutoChoice(name, False, "no installed plugin estimates how much memory reuse needs")
