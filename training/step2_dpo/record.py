"""The record of an optimizer step of step 2's DPO.

B sequences (a prompt with one response each).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from training.utils.preference.record import OF_PAIRS, of_pairs
from training.utils.preference.reference import response_sums
from training.utils.recording.content import joined, of_sequences, of_targets, step_figures
from training.utils.recording.files import RecordHead
from training.utils.recording.recorder import RecordContent
from training.utils.recording.schema import SETTINGS

_OF_LOSSES = ("label_smoothing", "simpo_gamma", "cpo_alpha", "desirable_weight", "undesirable_weight")

if TYPE_CHECKING:
    from training.step2_dpo.losses.pairs import Objective
    from training.step2_dpo.objectives import BetaSchedule
    from training.utils.preference.batches import PreferenceBatch
    from training.utils.recording.recorder import WatchedBatch
    from training.utils.setup.training_run import NextStep


class Points(NamedTuple):
    """found: each objective's reference point. mismatched: log-ratios of prompts with other rows' responses, of this
    rank. schedule: of beta."""

    found: Sequence[float]
    mismatched: Sequence[torch.Tensor]
    schedule: BetaSchedule


def dpo_record(
    step: NextStep[Any],
    watched: Sequence[WatchedBatch],
    batches: Sequence[PreferenceBatch],
    references: Sequence[torch.Tensor],
    *,
    objectives: Sequence[Objective],
    points: Points,
    figures: Mapping[str, float],
) -> RecordContent:
    """The record. references: [B] of each micro-batch. objectives: the terms of the loss. figures: `loss`, and those of
    the engine."""
    [objective, *others] = objectives
    sums = [
        response_sums(each.read, batch, objective.ld_alpha)
        for each, batch in zip(watched, batches, strict=True)
        if each.read is not None
    ]
    tensors = {
        **of_sequences(watched),
        **of_targets(watched),
        **of_pairs(watched, batches),
        "logprob_sums": joined(sums, torch.float32),
    }
    if any(one.loss.needs_reference for one in objectives):
        tensors["ref_logprob_sums"] = joined(references, torch.float32)
    settings: dict[str, Any] = {"beta": objective.beta, "ld_alpha": objective.ld_alpha}
    known = SETTINGS["preference_loss"][0]
    assert isinstance(known, tuple)
    if any(one.name not in known for one in objectives):
        pass  # of a loss that records have no name for nothing is said, so that it is not judged
    elif not others and objective.weight == 1.0:
        settings["preference_loss"] = objective.name
    else:
        settings["preference_terms"] = ",".join(f"{one.name}:{one.weight!r}" for one in objectives)
    for one in objectives:
        settings |= {name: float(getattr(one.options, name)) for name in _OF_LOSSES if hasattr(one.options, name)}
    own = {"loss": figures["loss"], "denominator": float(len(step.taken)), "beta": objective.beta}
    if any(one.loss.rows == "marked" for one in objectives):
        tensors = {name: value for name, value in tensors.items() if name not in OF_PAIRS}
        tensors["is_good"] = joined([batch.columns["is_good"] > 0 for batch in batches], torch.bool)
        own["reference_point"] = points.found[0]
        if points.mismatched:
            tensors["mismatched_ratios"] = joined(points.mismatched, torch.float32)
    if points.schedule.first != points.schedule.last:
        schedule = points.schedule
        settings |= {"first_beta": schedule.first, "final_beta": schedule.last, "beta_schedule": schedule.form}
    own |= step_figures("train", figures)
    return RecordContent(RecordHead("dpo", step.number, settings=settings, figures=own), tensors)
