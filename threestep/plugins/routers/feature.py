"""The routers of a run's mixtures, as a feature that has guests. Cheap to import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from threestep.plugins.routers.arguments import NO_REPLAY, ReplayArguments, RouterArguments
from training.utils.base.errors import ThreestepError
from training.utils.contracts.guests import GuestFeature

if TYPE_CHECKING:
    import torch

    from training.utils.contracts.guests import ExpertRecord, Guest


class RoutersFeature(GuestFeature):
    """coefficient: weight of the balancing loss; None takes each model's own. replay: of the first model's routers in
    rollouts, a value of --replay_routers."""

    place = 100

    def __init__(self, coefficient: float | None = None, replay: str = NO_REPLAY) -> None:
        self._coefficient, self._replay = coefficient, replay
        self.records_experts = replay != NO_REPLAY

    def open(self, models: Sequence[tuple[Any, Any]], path: str, total_steps: int, seed: int) -> Sequence[Guest | None]:
        """See `GuestFeature.open`."""
        from threestep.plugins.routers.step_loss import router_losses
        from training.utils.models.own_forward import IN_PIECES

        losses = router_losses(models, self._coefficient)
        for (_, model), loss in zip(models, losses, strict=True):
            if loss is not None and (flag := getattr(model, IN_PIECES, None)) is not None:
                raise ThreestepError(
                    f"{flag} computes a mixture's routers tile by tile, but their balancing loss needs all logits of "
                    f"a forward at once; set --router_aux_loss_coef 0, or remove {flag}"
                )
        return losses

    def reads_twice(self, model: Any) -> bool:
        """True where the loss needs the load of the whole step before."""
        from threestep.plugins.routers.routers import has_routers

        return self._coefficient != 0 and has_routers(model)

    def recorded_experts(self, model: Any, read: Callable[[Any], torch.Tensor], ranks: Any) -> ExpertRecord | None:
        """Return the record, which follows what it is given where that is asked for; None without replay."""
        from threestep.plugins.routers.opening import checked_replay

        return checked_replay(model, self._replay, read, ranks.device)


def routers_of(flags: Any) -> RoutersFeature:
    """Return the routers of a step's flags."""
    coefficient = flags.added.of(RouterArguments).router_aux_loss_coef
    return RoutersFeature(coefficient, flags.added.of(ReplayArguments).replay_routers)
