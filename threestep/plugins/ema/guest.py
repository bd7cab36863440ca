"""The moving average as a guest: it looks at each step of the actor, and adds nothing to its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from threestep.plugins.ema.weight_average import WeightAverage
from training.utils.contracts.guests import Guest, GuestStep

if TYPE_CHECKING:
    from training.utils.engine.training_engine import TrainingEngine


class KeptAverage(Guest):
    """average: of the weights that `engine` trains."""

    adds_to_loss = False

    def __init__(self, engine: TrainingEngine, decay: float) -> None:
        self._engine = engine
        self.average = WeightAverage(engine, decay)

    @property
    def other_weights(self) -> WeightAverage:
        """See `Guest.other_weights`."""
        return self.average

    def begin(self, rows: Sequence[Any], forward: Callable[[int, Any], Any], counted: Any) -> GuestStep:
        """See `Guest.begin`."""
        return _AverageStep(self._engine, self.average)


class _AverageStep(GuestStep):
    def __init__(self, engine: TrainingEngine, average: WeightAverage) -> None:
        self._engine, self._average, self._updates = engine, average, engine.updates

    def end(self, group: str, totals: Mapping[str, float]) -> dict[str, float]:
        """Add the new weights, unless the step was skipped."""
        if self._engine.updates > self._updates:
            self._average.update()
        return {}
