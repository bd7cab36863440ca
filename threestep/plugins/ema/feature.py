"""The moving average of a run's flags, as a feature that has a guest. Cheap to import."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from threestep.plugins.ema.arguments import AverageArguments
from training.utils.base.machine import MemoryLine
from training.utils.contracts.guests import GuestFeature

if TYPE_CHECKING:
    from training.utils.contracts.guests import Guest


class AverageFeature(GuestFeature):
    """decay: of the average; None keeps none."""

    place = 400

    def __init__(self, decay: float | None = None) -> None:
        self._decay = decay

    def open(self, models: Sequence[tuple[Any, Any]], path: str, total_steps: int, seed: int) -> Sequence[Guest | None]:
        """See `GuestFeature.open`."""
        if self._decay is None:
            return ()
        from threestep.plugins.ema.guest import KeptAverage

        return [KeptAverage(models[0][0], self._decay)]

    def planned(
        self, model: Any, settings: Any, ranks: int, device: Any
    ) -> tuple[Sequence[str], Sequence[Any], Sequence[Any]]:
        """See `GuestFeature.planned`."""
        if self._decay is None:
            return (), (), ()
        trained = sum(part.numel() for part in model.parameters() if part.requires_grad)
        return (), [MemoryLine("moving average", 4 * -(-trained // ranks))], ()


def average_of(flags: Any) -> AverageFeature:
    """Return the average of a step's flags."""
    given = flags.added.of(AverageArguments)
    return AverageFeature(given.ema_decay if given.enable_ema else None)
