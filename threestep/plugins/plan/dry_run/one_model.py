"""`--dry_run` of the steps that train one model: build it without weights, plan its batches, estimate memory and
time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from threestep.plugins.plan.arguments import DryRunArguments
from threestep.plugins.plan.clock.training_step import Parts, step_parts
from threestep.plugins.plan.dry_run.clock import clock_device, step_plan
from threestep.plugins.plan.dry_run.device import check_fits, planned_device
from threestep.plugins.plan.dry_run.estimate import Estimate, ModelCounts, kept_counts, print_estimate
from threestep.plugins.plan.dry_run.plan import LargestForward, plan_training, rows_at_most
from threestep.plugins.plan.dry_run.sharing import print_advice, with_sharing
from threestep.plugins.plan.dry_run.table import ranks_of_dry_run
from training.utils.engine.config.arguments import SEQUENCES_OF_A_FORWARD
from training.utils.engine.ranks.startup import DTYPES
from training.utils.flags.flags import AutoChoice, sentence
from training.utils.loading.configurations import check_positions, check_trains
from training.utils.models.row_sharing import row_sharing
from training.utils.setup.media import planned_media
from training.utils.setup.setup import ranks_in_words

if TYPE_CHECKING:
    from training.utils.base.machine import PlannedDevice
    from training.utils.setup.flags import OneModelFlags


def dry_run(flags: OneModelFlags, scalar: bool, responses: int) -> None:
    """Print what a step's run would be. responses: of one prompt, 2 for pairs. ThreestepError if it does not fit."""
    ranks, counts, sharing = ranks_of_dry_run(flags.run.num_ranks), kept_counts(), row_sharing(flags.added)
    estimate = estimated(flags, scalar, responses, counts)
    print_estimate(estimate, flags.step.program, flags.added.of(DryRunArguments), flags.settings, ranks=ranks)

    def shared_by(size: int) -> Estimate:
        return estimated(flags._replace(added=with_sharing(flags.added, sharing, size)), scalar, responses, counts)

    print_advice(sharing, estimate, shared_by)
    check_fits(estimate.device, estimate.most().device_bytes, flags.settings, ranks)


def chosen_forward(
    flags: OneModelFlags, scalar: bool, responses: int, counts: ModelCounts, *, device: PlannedDevice
) -> AutoChoice:
    """Return what --per_device_train_batch_size auto stands for on `device`, with the memory that is free there: the
    most sequences that divide a step, of whose forward the estimate fits; one, if none does."""
    step = SEQUENCES_OF_A_FORWARD * flags.engine.gradient_accumulation_steps
    sizes = [size for size in range(step, 0, -1) if step % size == 0]
    for size in sizes:
        needed = _estimated_as_given(flags.with_forwards_of(size), scalar, responses, counts).most_bytes(device)
        if device.leaves_room(needed):
            break
    free = "" if device.memory_bytes is None else f" of {device.memory_bytes / 1e9:.3g} GB free"
    return AutoChoice(
        "per_device_train_batch_size", size, f"of {step} in a step; a forward may need {needed / 1e9:.3g} GB{free}"
    )


def estimated(flags: OneModelFlags, scalar: bool, responses: int, counts: ModelCounts) -> Estimate:
    """Return the estimate of a step's run, with --per_device_train_batch_size chosen where it is left to auto."""
    if flags.engine.per_device_train_batch_size is not None:
        return _estimated_as_given(flags, scalar, responses, counts)
    device = planned_device(flags.added.of(DryRunArguments))
    choice = chosen_forward(flags, scalar, responses, counts, device=device)
    found = _estimated_as_given(flags.with_forwards_of(choice.value), scalar, responses, counts)
    return replace(found, plan=[*found.plan, sentence([choice])])


def _estimated_as_given(flags: OneModelFlags, scalar: bool, responses: int, counts: ModelCounts) -> Estimate:
    """Return the estimate with --per_device_train_batch_size as it is."""
    engine, model, max_seq_len = flags.engine, flags.start, flags.data.rows.max_seq_len
    ranks = ranks_of_dry_run(flags.run.num_ranks)
    device = planned_device(flags.added.of(DryRunArguments))
    sharing = row_sharing(flags.added)
    sharing.check_ranks(ranks)
    settings = engine.settings(flags.of_step.learning_rate, flags.added)
    check_positions(model, max_seq_len, "--max_seq_len")
    check_trains(model, generates=not scalar)
    built = counts.model(model, DTYPES[settings.dtype], scalar)
    sharing.check_model(built, max_seq_len)
    sequences = engine.per_device_train_batch_size
    assert sequences is not None, "chosen before"
    small = flags.guests.keep_forwards_small(built, not device.is_cuda, sharing.size)
    forward = _forward(flags, sequences, responses, small)
    planned = plan_training(built, forward, model, settings, ranks=ranks, device=device, count=counts.activations)
    sentences, held, moments = flags.guests.planned(built, settings, ranks, device)
    kept = [] if forward.media is None else [forward.media.kept(flags.added)]

    def parts() -> Parts | None:
        timed = clock_device(
            flags.added.of(DryRunArguments).device,
            settings.dtype,
            sharing,
            settings=flags.settings,
            ranks=ranks,
        )
        if timed is None:
            return None
        work = counts.work(built, forward.rows, max_seq_len, forward.targets)
        forwards = -(-engine.gradient_accumulation_steps * sequences * responses // forward.rows)
        plan = step_plan(built, model, settings, ranks=ranks, micro_steps=forwards)
        return step_parts(work, plan, timed)

    return Estimate(
        [*planned.sentences, *sentences, _batches(flags, sequences, responses, forward, ranks=ranks)],
        [*planned.engine.held, *kept, *held],
        [*planned.moments, *moments],
        device,
        parts,
        engine.max_train_steps,
        sharing.sizes_for(built, ranks, max_seq_len),
    )


def _forward(flags: OneModelFlags, sequences: int, responses: int, keeps_small: bool) -> LargestForward:
    """The largest forward of `sequences`; each token may be predicted."""
    engine, model, longest = flags.engine, flags.start, flags.data.rows.max_seq_len
    packed, most = not engine.padded, engine.max_tokens_per_micro_batch
    rows = rows_at_most(sequences, longest, packed, most, shared_by=responses, keeps_small=keeps_small)
    tokens = rows * longest
    together = sequences * (1 if packed else responses) * longest * engine.gradient_accumulation_steps
    media = planned_media(model.name_or_path, model.trust_remote_code, tokens, together)
    return LargestForward(rows, longest, tokens, masked=packed, media=media, sharing=row_sharing(flags.added).size)


def _batches(flags: OneModelFlags, sequences: int, responses: int, forward: LargestForward, *, ranks: int) -> str:
    """An optimizer step and a forward, in words."""
    engine, accumulation = flags.engine, flags.engine.gradient_accumulation_steps
    sequences_per_step = sequences * (ranks // forward.sharing) * accumulation
    return (
        f"batches: an optimizer step uses {sequences_per_step} {'prompts' if responses > 1 else 'sequences'} "
        f"({sequences} x {ranks_in_words(ranks, forward.sharing)} x {accumulation}); a forward on "
        f"{'one rank' if forward.sharing == 1 else 'one group'} holds at most {forward.targets:,} tokens in "
        f"{'padded' if engine.padded else 'packed'} rows of at most {forward.tokens:,}"
    )
