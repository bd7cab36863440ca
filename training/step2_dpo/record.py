"""The record of an optimizer step of step 2's DPO.

B sequences (a prompt with one response each).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from training.utils.layout.ranked import sequence_sums
from training.utils.preference.record import OF_PAIRS, of_pairs
from training.utils.recording.content import joined, of_sequences, of_targets, step_figures
from training.utils.recording.files import RecordHead
from training.utils.recording.recorder import RecordContent

_KNOWN = ("sigmoid", "ipo", "hinge")  # losses that a record has by name (`schema.SETTINGS`)

if TYPE_CHECKING:
    from training.step2_dpo.losses.pairs import Objective
    from training.utils.preference.batches import PreferenceBatch
    from training.utils.recording.recorder import WatchedBatch
    from training.utils.setup.training_run import NextStep


def dpo_record(
    step: NextStep[Any],
    watched: Sequence[WatchedBatch],
    batches: Sequence[PreferenceBatch],
    references: Sequence[torch.Tensor],
    *,
    objectives: Sequence[Objective],
    figures: Mapping[str, float],
) -> RecordContent:
    """The record. references: [B] of each micro-batch. objectives: the terms of the loss. figures: `loss`, and those of
    the engine."""
    sums = [
        sequence_sums(each.read, batch.ranked.rows.sequence_M, batch.ranked.rows.end_B.numel())
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
    settings, loss = dict[str, Any](), dict[str, float]()
    [objective, *others] = objectives
    # Of other losses, and of sums, a record has the parts before the loss.
    if objective.name in _KNOWN and not others and objective.weight == objective.ld_alpha == 1.0:
        settings = {"beta": objective.beta, "preference_loss": objective.name}
        settings["label_smoothing"] = float(getattr(objective.options, "label_smoothing", 0.0))
        loss = {"loss": figures["loss"]}
    if tensors["chosen"].numel():
        loss["denominator"] = float(len(step.taken))
    else:  # marked responses make no pairs, and what a record's schema divides by is their number
        tensors = {name: value for name, value in tensors.items() if name not in OF_PAIRS}
    own = {**loss, **step_figures("train", figures)}
    return RecordContent(RecordHead("dpo", step.number, settings=settings, figures=own), tensors)
