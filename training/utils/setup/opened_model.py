"""A run that trains one model, between its flags and its end; and the result of its loop. Cheap to import: `--help`
reaches this module."""

from __future__ import annotations

from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class TrainingResult:
    """before, after: the evaluations; None without evaluation rows
    summary: the run's closing figures
    sentence: the same in words, up to the seconds
    signs: that the run has diverged, to be put behind the last line; "" for none
    reports: further JSON files of the run's folder by name, written once the model is
    """

    before: Any
    after: Any
    summary: dict[str, float | None]
    sentence: str
    signs: str = ""
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
