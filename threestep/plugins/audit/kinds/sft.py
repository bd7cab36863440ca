"""The record of an optimizer step of step 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from threestep.plugins.audit.recording.content import (
    RecordContent,
    StepKind,
    Watched,
    joined,
    of_sequences,
    of_targets,
    step_figures,
)
from threestep.plugins.audit.recording.files import RecordHead

if TYPE_CHECKING:
    from training.step1_sft.trainer import SftStep


def sft_record(step: SftStep, watched: Watched) -> RecordContent:
    """The record of a step."""
    seen, figures = watched["train"], step.figures
    rows = [step.prepared.batch[place] for batch in step.prepared.micro_batches for place in batch.taken]
    tensors = {
        **of_sequences(seen),
        **of_targets(seen),
        "rows": torch.tensor([row.row_id for row in rows], dtype=torch.int64),
        "data_mask": joined([torch.tensor(row.loss_mask) for row in rows], torch.bool),
    }
    if step.regularizer.losses:
        del tensors["micro_losses"]  # a part of a loss that a record does not know is in them
    denominator = float(step.prepared.targets)
    head = RecordHead(
        "sft",
        step.number,
        settings={"reduction": "token mean"},
        figures={"loss": figures["loss"], "denominator": denominator, **step_figures("train", figures)},
    )
    return RecordContent(head, tensors, dict(step.regularizer.recorded))


KIND = StepKind(sft_record)
