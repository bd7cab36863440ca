"""The record of an optimizer step of step 2's DPO.

B sequences (a prompt with one response each).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from threestep.plugins.audit.kinds.pairs import OF_PAIRS, of_pairs
from threestep.plugins.audit.recording.content import (
    RecordContent,
    StepKind,
    StepNumbers,
    Watched,
    joined,
    of_sequences,
    of_targets,
    step_figures,
    step_numbers,
)
from threestep.plugins.audit.recording.files import RecordHead
from threestep.plugins.audit.recording.schema import SETTINGS
from training.utils.preference.reference import response_sums

if TYPE_CHECKING:
    from training.step2_dpo.trainer import DpoStep

_OF_LOSSES = ("label_smoothing", "simpo_gamma", "cpo_alpha", "desirable_weight", "undesirable_weight")


def dpo_record(step: DpoStep, watched: Watched) -> RecordContent:
    """The record of a step."""
    seen, batches, objectives = watched["train"], step.batches, step.objectives
    [objective, *others] = objectives
    sums = [
        response_sums(each.read, batch, objective.ld_alpha)
        for each, batch in zip(seen, batches, strict=True)
        if each.read is not None
    ]
    tensors = {
        **of_sequences(seen),
        **of_targets(seen),
        **of_pairs(seen, batches),
        "logprob_sums": joined(sums, torch.float32),
    }
    if any(one.loss.needs_reference for one in objectives):
        tensors["ref_logprob_sums"] = joined(step.references, torch.float32)
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
    own = {"loss": step.figures["loss"], "denominator": float(len(step.row_ids())), "beta": objective.beta}
    if any(one.loss.rows == "marked" for one in objectives):
        tensors = {name: value for name, value in tensors.items() if name not in OF_PAIRS}
        tensors["is_good"] = joined([batch.columns["is_good"] > 0 for batch in batches], torch.bool)
        own["reference_point"] = step.points.found[0]
        if step.points.mismatched:
            tensors["mismatched_ratios"] = joined(step.points.mismatched, torch.float32)
    schedule = step.schedule
    if schedule.first != schedule.last:
        settings |= {"first_beta": schedule.first, "final_beta": schedule.last, "beta_schedule": schedule.form}
    own |= step_figures("train", step.figures)
    return RecordContent(RecordHead("dpo", step.number, settings=settings, figures=own), tensors)


def _numbers(step: DpoStep, is_main: bool) -> StepNumbers:
    return step_numbers(step, is_main, lambda: {"reference": torch.cat([*step.references])})


KIND = StepKind(dpo_record, _numbers)
