"""`--dry_run` of step 3: every role without weights, the plan of rollouts and updates, and one rank's memory
and seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.plan.arguments import DryRunArguments
from threestep.plugins.plan.dry_run.activations import SavedActivations, cache_bytes
from threestep.plugins.plan.dry_run.device import check_fits, planned_device
from threestep.plugins.plan.dry_run.engine_memory import ELEMENT_BYTES, gathered_elements, pinned_shards, weights_memory
from threestep.plugins.plan.dry_run.estimate import ROLLING_OUT, Estimate, ModelCounts, kept_counts, print_estimate
from threestep.plugins.plan.dry_run.plan import (
    LargestForward,
    PlannedModel,
    plan_training,
    planned_limits,
    rows_at_most,
)
from threestep.plugins.plan.dry_run.ppo_time import rollout_parts
from threestep.plugins.plan.dry_run.sharing import print_advice, with_sharing
from threestep.plugins.plan.dry_run.table import ranks_of_dry_run
from training.step3_ppo.flags.checks import FORWARDS, VALUES, Components, check_models, chosen_by_flags, with_reuse
from training.utils.base.errors import ThreestepError
from training.utils.base.machine import MemoryLine, Moment, PlannedDevice
from training.utils.contracts.rollout_engine import PlannedActor, RolloutEngine
from training.utils.engine.config.config import engine_config
from training.utils.engine.ranks.startup import DTYPES
from training.utils.engine.zero3 import GATHER_ELEMENTS, model_sizes
from training.utils.flags.flags import AutoChoice, sentence
from training.utils.models.row_sharing import row_sharing
from training.utils.models.weights import adapters_of, packed_elements
from training.utils.setup.media import planned_media

if TYPE_CHECKING:
    from training.step3_ppo.flags.arguments import PpoArguments
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.step3_ppo.flags.roles_arguments import RolesArguments
    from training.utils.contracts.media import PlannedMedia
    from training.utils.models.row_sharing import RowSharing

_DRAWING_COPIES = 4  # of a step's logits in float32: themselves, their exponentials, and copies of a cut
# On a CPU, how many times the memory of a step kept graphs may take it to: a GPU's free memory is the run's own, a
# CPU's is everybody's. It lies between what took a step of PPO above TRL's memory and what did not (docs/lab_book.md).
_MOST_TIMES = 2.0
# Of a family whose forward needs numbers, which a model without weights does not have.
_UNCOUNTED = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, ThreestepError)


def dry_run(flags: PpoFlags, components: Components) -> None:
    """Print what a run of step 3 would be. ThreestepError if it does not fit."""
    ranks, counts, sharing = ranks_of_dry_run(flags.run.num_ranks), kept_counts(), row_sharing(flags.added)
    estimate = estimated(flags, components, counts)
    print_estimate(estimate, "training.step3_ppo.main", flags.added.of(DryRunArguments), flags.settings, ranks=ranks)

    def shared_by(size: int) -> Estimate:
        return estimated(flags._replace(added=with_sharing(flags.added, sharing, size)), components, counts)

    print_advice(sharing, estimate, shared_by)
    check_fits(estimate.device, estimate.most().device_bytes, flags.settings, ranks)


def estimated(flags: PpoFlags, components: Components, counts: ModelCounts) -> Estimate:
    """Return the estimate of a run of step 3, with --reuse_forwards and --reuse_values chosen where they are left to
    auto."""
    choices, found = list[AutoChoice](), None
    if flags.ppo.reuse_values is None:
        choices.append(chosen_by_flags(VALUES, flags, components.algorithm))
        flags = with_reuse(flags, choices[-1])
    if flags.ppo.reuse_forwards is None:
        device = planned_device(flags.added.of(DryRunArguments))
        chosen, found = _chosen_reuse(flags, components, counts, device)
        choices.append(chosen)
        flags = with_reuse(flags, chosen)
    if found is None:
        found = estimated_as_given(flags, components, counts)
    return replace(found, plan=[*found.plan, sentence(choices)]) if choices else found


def chosen_reuse(flags: PpoFlags, components: Components, device: PlannedDevice) -> AutoChoice:
    """Return what --reuse_forwards auto stands for by flags and models without weights. device: with the memory that
    is free, if that is known."""
    try:
        return _chosen_reuse(flags, components, kept_counts(), device)[0]
    except _UNCOUNTED:
        return AutoChoice(FORWARDS, False, "cannot count the memory of this model family")


def _chosen_reuse(
    flags: PpoFlags, components: Components, counts: ModelCounts, device: PlannedDevice
) -> tuple[AutoChoice, Estimate | None]:
    """The same, with the estimate of what was chosen, if it was made for that."""
    name, chosen = FORWARDS, chosen_by_flags(FORWARDS, flags, components.algorithm)
    if not chosen.value:
        return chosen, None
    if device.is_cuda and device.memory_bytes is None:
        return chosen, None
    found = estimated_as_given(with_reuse(flags, chosen), components, counts)
    needed = found.most_bytes(device)
    if not device.is_cuda:
        apart = estimated_as_given(with_reuse(flags, chosen._replace(value=False)), components, counts)
        least = apart.most_bytes(device)
        if needed > _MOST_TIMES * least:
            more = f"true is faster but needs {needed / 1e9:.3g} GB instead of {least / 1e9:.3g} GB"
            return AutoChoice(name, False, more), apart
    if device.memory_bytes is None or device.leaves_room(needed):
        return chosen, found
    free = device.memory_bytes / 1e9
    return AutoChoice(name, False, f"true may need {needed / 1e9:.3g} GB, but only {free:.3g} GB are free"), None


def estimated_as_given(flags: PpoFlags, components: Components, counts: ModelCounts) -> Estimate:
    """Return the estimate with --reuse_forwards and --reuse_values as they are."""
    roles, ppo, longest = flags.roles, flags.ppo, flags.longest_tokens
    ranks = ranks_of_dry_run(flags.run.num_ranks)
    sharing = row_sharing(flags.added)
    sharing.check_ranks(ranks)
    device = planned_device(flags.added.of(DryRunArguments))
    check_models(flags, components.with_critic_tokenizer)
    actor, critic, scorer = _models_on_meta(flags, components, counts)
    sizes = _sizes_for((actor, critic, scorer), ranks, longest, sharing)

    keeps_small = flags.guests.keep_forwards_small(actor, not device.is_cuda, sharing.size)
    forward = _forward(flags, components, keeps_small)
    whole_logits = _whole_logits(actor, forward, components)
    planned_role = partial(_trained, flags=flags, ranks=ranks, device=device, count=counts.activations)
    trained = {"actor": planned_role("actor", actor, forward, *whole_logits)}
    if critic is not None:
        trained["critic"] = planned_role("critic", critic, replace(forward, with_entropy=False))
    held = [line for planned in trained.values() for line in planned.engine.held]
    frozen_lines, scoring = _frozen(
        actor, scorer, flags, components, where=(ranks, device, trained["actor"].layer_bytes)
    )
    kept = [] if forward.media is None else [forward.media.kept(flags.added)]
    held += [*frozen_lines, *kept]

    rollout, asleep = _rollout(actor, flags, components.rollout_engine, device, media=forward.media)
    held += asleep
    if components.scheduler is not None:
        versions = components.scheduler.kept_versions(components.rollout_engine, beside_training=not device.is_cuda)
        line = _kept_weights(actor, roles, versions)
        if device.is_cuda:  # drawn before the step, not beside it
            rollout.append(line)
        else:
            held, rollout = [*held, line, *rollout], []
    reused = _reused(trained, ppo, forward)
    moments = [Moment(ROLLING_OUT, tuple(rollout)), *scoring]
    for role, planned in trained.items():
        backward, stepping = planned.moments
        moments.append(Moment(f"in a backward of the {role}", (*backward.lines, *reused.get(role, ()))))
        moments.append(Moment(f"in the {role}'s optimizer step", stepping.lines))
    sentences = [f"{role}: {sentence}" for role, planned in trained.items() for sentence in planned.sentences]
    beside, held_beside, moments_beside = flags.guests.planned(actor, roles.engine("actor"), ranks, device)
    readers = {"actor": actor, "critic": critic, "reward model": scorer, **_reference(actor, components)}
    return Estimate(
        [*sentences, *beside, _batches(ppo, forward, longest, ranks)],
        [*held, *held_beside],
        [*moments, *moments_beside],
        device,
        partial(rollout_parts, flags, readers, forward, counts.work, ranks=ranks, engine=components.rollout_engine),
        ppo.max_train_steps,
        sizes,
        unit="rollout",
    )


def _reference(actor: Any, components: Components) -> dict[str, Any]:
    """The reference among the models that read every sequence, if there is one: of the actor's shape."""
    return {"reference": actor} if components.algorithm.wants_reference else {}


def _models_on_meta(flags: PpoFlags, components: Components, counts: ModelCounts) -> tuple[Any, Any, Any]:
    """Return the actor, the critic and the reward model; None for one that there is not."""
    build, dtype = counts.model, DTYPES[flags.roles.dtype]
    actor, critic, scorer = build(flags.model("actor"), dtype), None, None
    if components.algorithm.estimator.needs_critic:
        critic = build(flags.model("critic"), dtype, True)
    if components.with_reward_model:
        scorer = build(flags.model("critic").as_it_is(), dtype, True)
    return actor, critic, scorer


def _sizes_for(models: tuple[Any, Any, Any], ranks: int, longest_tokens: int, sharing: RowSharing) -> list[int]:
    """Return how many ranks could share a row of all models that there are; ThreestepError if those of `sharing`
    cannot."""
    sizes = set(range(1, ranks + 1))
    for model in filter(None, models):
        sharing.check_model(model, longest_tokens)
        sizes &= {*sharing.sizes_for(model, ranks, longest_tokens)}
    return sorted(sizes)


def _reused(
    trained: dict[str, PlannedModel], ppo: PpoArguments, forward: LargestForward
) -> dict[str, tuple[MemoryLine, ...]]:
    """Memory that --reuse_forwards holds in each role's backward, besides the forward that learns."""
    if not ppo.reuse_forwards:
        return {}
    forwards, own = -(-ppo.sequences_per_minibatch // forward.rows), trained["actor"].forward[0].device_bytes
    further = {"actor": (forwards - 1) * own, "critic": forwards * own}
    return {role: (MemoryLine("the actor's stored activations", further[role]),) for role in trained if further[role]}


def _whole_logits(actor: Any, forward: LargestForward, components: Components) -> list[MemoryLine]:
    """The exact KL holds the float32 logits of both models (`--kl_estimator full`)."""
    algorithm = components.algorithm
    if not (algorithm.wants_reference and algorithm.kl_estimator.of_logits):
        return []
    vocabulary = actor.config.get_text_config().vocab_size
    return [MemoryLine("actor: both models' logits for the exact KL", 2 * 4 * forward.targets * vocabulary)]


def _forward(flags: PpoFlags, components: Components, keeps_small: bool) -> LargestForward:
    """A sequence is a prompt and a response; only responses are predicted, and prompts alone hold media."""
    ppo, longest = flags.ppo, flags.longest_tokens
    sequences = ppo.per_device_training_batch_size
    most = ppo.max_tokens_per_micro_batch
    rows = rows_at_most(sequences, longest, not ppo.padded, most, keeps_small=keeps_small)
    with_entropy = components.algorithm.flags.entropy_coef > 0
    targets = rows * ppo.max_answer_seq_len
    prompts = ppo.sequences_per_rollout // (1 if ppo.padded else ppo.num_samples_per_prompt)  # packed rows share theirs
    model, longest_prompt = flags.roles.actor_model_name_or_path, flags.data.rows.max_prompt_seq_len
    most, at_once = rows * longest_prompt, prompts * longest_prompt
    media = planned_media(model, flags.roles.trust_remote_code, most, at_once)
    return LargestForward(rows, longest, targets, not ppo.padded, with_entropy, media, row_sharing(flags.added).size)


def _trained(
    role: str,
    model: Any,
    forward: LargestForward,
    *further: MemoryLine,
    flags: PpoFlags,
    ranks: int,
    device: PlannedDevice,
    count: Callable[..., SavedActivations],
) -> PlannedModel:
    loading, settings = flags.model(role), flags.roles.engine(role)
    planned = plan_training(model, forward, loading, settings, ranks=ranks, device=device, count=count)
    named = [replace(line, name=f"{role}: {line.name}") for line in planned.forward]
    return replace(planned, engine=planned.engine.named(role), forward=(*named, *further))


def _frozen(
    actor: Any,
    scorer: Any,
    flags: PpoFlags,
    components: Components,
    *,
    where: tuple[int, PlannedDevice, int],
) -> tuple[list[MemoryLine], list[Moment]]:
    """Memory of reference, reward model and moving average, if there are any, and of sharded ones' forwards.

    where: ranks, the device, and the bytes of a layer's activations
    """
    frozen, lines, moments = [], [], list[Moment]()
    roles, (ranks, device, layer_bytes) = flags.roles, where
    if components.algorithm.wants_reference and not flags.model("actor").is_own_reference:
        frozen.append(("reference", actor, roles.frozen_engine("actor")))
    if scorer is not None:
        frozen.append(("reward model", scorer, roles.frozen_engine("critic")))
    for name, model, engine in frozen:
        zero: dict[str, Any] = {"stage": 0}
        sizes = [part.numel() for part in _plain_parameters(model)]
        if engine.zero_stage == 3:
            whole_sizes = model_sizes(model)
            limits = planned_limits(whole_sizes, engine, ranks, device)
            zero = engine_config(engine, ranks, 1, device.is_cuda, limits=limits)["zero_optimization"]
            gathered = gathered_elements(sum(sizes), whole_sizes.module, zero, trains=False)
            whole = MemoryLine(f"{name}: gathered weights", ELEMENT_BYTES[engine.dtype] * gathered)
            doing = f"in a forward of the {name}"
            moments.append(Moment(doing, (whole, MemoryLine(f"{name}: a layer's activations", layer_bytes))))
        for line in (
            weights_memory(sum(sizes), engine.dtype, zero, ranks),
            pinned_shards(sizes, engine.dtype, zero, ranks),
        ):
            lines.append(replace(line, name=f"{name}: {line.name}"))
    return lines, moments


def _plain_parameters(model: Any) -> list[Any]:
    """Weights without adapters."""
    adapters = adapters_of(model)
    return [part for name, part in model.named_parameters() if not adapters.holds(name)]


def _rollout(
    actor: Any,
    flags: PpoFlags,
    engine: type[RolloutEngine],
    device: PlannedDevice,
    *,
    media: PlannedMedia | None,
) -> tuple[list[MemoryLine], list[MemoryLine]]:
    """Return what drawing responses adds, and what the engine keeps between rollouts. media: of a forward that
    learns."""
    roles, ppo, longest = flags.roles, flags.ppo, flags.longest_tokens
    elements = sum(map(torch.numel, _plain_parameters(actor))) + packed_elements(actor)
    weights = ELEMENT_BYTES[roles.dtype] * elements
    is_sharded = roles.actor_zero_stage == 3
    sent = _sent_bytes(actor, roles) if is_sharded else 0
    planned = PlannedActor(weights, sent, device.is_cuda, device.memory_bytes if device.is_cuda else None)
    memory = engine.planned_memory(flags.settings_of_engine(engine), planned)
    if memory is not None:
        drawing, always = ([MemoryLine(*line) for line in part.items()] for part in memory)
        return drawing, always
    size = ELEMENT_BYTES[roles.dtype]
    sequences = ppo.per_device_generation_batch_size * ppo.num_samples_per_prompt
    if flags.data.form is not None:
        sequences *= flags.data.form.rows
    config = actor.config.get_text_config()
    cached = partial(cache_bytes, config, sequences, longest, size)
    lines = [  # at its start all rows of a rollout are alive
        MemoryLine(f"rollout: key-value cache, {sequences} x {longest}", cached()),
        # Its room grows layer by layer, and before that a prompt's keys and values are repeated for its responses.
        MemoryLine("rollout: copy of one layer's cache", cached(largest_layer=True)),
        MemoryLine("rollout: logits of one token", sequences * config.vocab_size * (size + 4 * _DRAWING_COPIES)),
    ]
    if media is not None:
        drawn = ppo.per_device_generation_batch_size * flags.data.rows.max_prompt_seq_len
        seen = media.of_tokens(drawn).lines(actor)
        lines += [replace(line, name=f"rollout: {line.name}") for line in seen]
    if is_sharded:
        lines.append(MemoryLine("rollout: the actor's full weights", weights))
    return lines, []


def _kept_weights(actor: Any, roles: RolesArguments, versions: int) -> MemoryLine:
    """The whole weights of so many steps, by which later rollouts are drawn."""
    elements = sum(map(torch.numel, _plain_parameters(actor))) + packed_elements(actor)
    return MemoryLine(
        f"rollouts ahead: the actor's weights, copied {versions} x", versions * ELEMENT_BYTES[roles.dtype] * elements
    )


def _sent_bytes(actor: Any, roles: RolesArguments) -> int:
    """ZeRO-3 gathers a bucket of weights, or one that is larger; an engine copies a layer's until it has them all."""
    sizes = model_sizes(actor)
    return ELEMENT_BYTES[roles.dtype] * (GATHER_ELEMENTS + sizes.module + max(sizes.block, sizes.module))


def _batches(ppo: PpoArguments, forward: LargestForward, longest: int, ranks: int) -> str:
    rolled_out, minibatch = ppo.sequences_per_rollout, ppo.sequences_per_minibatch
    return (
        f"batches: a rank generates {ppo.num_samples_per_prompt} x {ppo.per_device_generation_batch_size} "
        f"responses at a time and {rolled_out} ({rolled_out * ranks} on all ranks) per rollout; an optimizer step "
        f"uses {minibatch * ranks} of them, which makes {rolled_out // minibatch * ppo.ppo_epochs} steps per "
        f"rollout; a forward on one rank holds at most {forward.rows * forward.tokens:,} tokens, and a sequence at "
        f"most {longest:,}"
    )
