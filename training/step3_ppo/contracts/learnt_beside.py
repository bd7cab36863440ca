"""Data that the actor learns from beside its rollouts, in the same optimizer steps (`learnt_beside` of plugins)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from training.utils.engine.accumulate import MicroBatch
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.layout.rank_share import SequenceLayout


class LearntBeside:
    """This one has nothing to learn from. fingerprint: of its data, by which a run that resumes knows them."""

    fingerprint = ""

    def beside(self, count: int, actor: TrainingEngine, layout: SequenceLayout) -> Sequence[MicroBatch]:
        """Return this rank's micro-batches of the actor for the next minibatch, of `count` sequences of all ranks."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return what steps change, as JSON holds it, by names that the trainer's state has for nothing else."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
