"""The record of an optimizer step of step 2's reward model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from training.utils.preference.record import of_pairs
from training.utils.recording.content import joined, of_sequences, step_figures
from training.utils.recording.files import RecordHead
from training.utils.recording.recorder import RecordContent

if TYPE_CHECKING:
    from training.step2_reward.loss import LossOptions
    from training.utils.preference.batches import PreferenceBatch
    from training.utils.recording.recorder import WatchedBatch
    from training.utils.setup.training_run import NextStep


def reward_record(
    step: NextStep[Any],
    watched: Sequence[WatchedBatch],
    batches: Sequence[PreferenceBatch],
    options: LossOptions,
    *,
    figures: Mapping[str, float],
    of_ends: bool,
) -> RecordContent:
    """The record. figures: `loss`, and those of the engine. of_ends: the loss compares the scores of whole responses;
    otherwise the record has no scores."""
    tensors = {**of_sequences(watched), **of_pairs(watched, batches)}
    if of_ends:
        tensors["scores"] = joined([each.read for each in watched if each.read is not None], torch.float32)
    own = {"loss": figures["loss"], "denominator": float(len(step.taken)), **step_figures("train", figures)}
    return RecordContent(RecordHead("reward", step.number, settings=asdict(options), figures=own), tensors)
