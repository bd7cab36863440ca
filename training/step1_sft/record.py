"""The record of an optimizer step of step 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from training.utils.recording.content import joined, of_sequences, of_targets, step_figures
from training.utils.recording.files import RecordHead
from training.utils.recording.recorder import RecordContent

if TYPE_CHECKING:
    from training.utils.contracts.rows import SentenceRow
    from training.utils.recording.recorder import WatchedBatch


def sft_record(
    step: int,
    watched: Sequence[WatchedBatch],
    rows: Sequence[Sequence[SentenceRow]],
    targets: int,
    *,
    figures: Mapping[str, float],
) -> RecordContent:
    """The record. rows: of each micro-batch, in the order of its sequences. targets: of all ranks. figures: `loss`,
    `z_loss` with one, and those of the engine."""
    flat = [row for part in rows for row in part]
    tensors = {
        **of_sequences(watched),
        **of_targets(watched),
        "rows": torch.tensor([row.row_id for row in flat], dtype=torch.int64),
        "data_mask": joined([torch.tensor(row.loss_mask) for row in flat], torch.bool),
    }
    if "z_loss" in figures:
        del tensors["micro_losses"]  # a part of a loss that a record does not know is in them
    head = RecordHead(
        "sft",
        step,
        settings={"reduction": "token mean"},
        figures={"loss": figures["loss"], "denominator": float(targets), **step_figures("train", figures)},
    )
    return RecordContent(head, tensors)
