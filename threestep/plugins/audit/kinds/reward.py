"""The record of an optimizer step of step 2's reward model."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from threestep.plugins.audit.kinds.pairs import of_pairs
from threestep.plugins.audit.recording.content import (
    RecordContent,
    StepKind,
    Watched,
    joined,
    of_sequences,
    step_figures,
)
from threestep.plugins.audit.recording.files import RecordHead

if TYPE_CHECKING:
    from training.step2_reward.trainer import RewardStep


def reward_record(step: RewardStep, watched: Watched) -> RecordContent:
    """The record of a step; without scores where the loss does not compare those of whole responses."""
    seen, figures = watched["train"], step.figures
    tensors = {**of_sequences(seen), **of_pairs(seen, step.batches)}
    if step.reads_ends:
        tensors["scores"] = joined([each.read for each in seen if each.read is not None], torch.float32)
    own = {"loss": figures["loss"], "denominator": float(len(step.row_ids())), **step_figures("train", figures)}
    return RecordContent(RecordHead("reward", step.number, settings=asdict(step.options), figures=own), tensors)


KIND = StepKind(reward_record)
