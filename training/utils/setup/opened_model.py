"""A run that trains one model, between its flags and its end. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.data.build.build import PhaseData
    from training.utils.setup.flags import OneModelFlags
    from training.utils.setup.training_run import TrainingRun


@dataclass(frozen=True)
class OpenedModel:
    """added_tokens: those that the tokenizer gained at the start; the model draws their embeddings
    model: the transformers model inside `training.engine`
    """

    flags: OneModelFlags
    phase: PhaseData
    added_tokens: int
    model: PreTrainedModel
    training: TrainingRun[Any]
