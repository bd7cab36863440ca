"""A queue of rollouts, which decides when, and by which weights, the rollouts of a step are drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from training.step3_ppo.contracts.records import Asked, RolloutsOfStep
    from training.step3_ppo.contracts.rollout_events import RolloutEvents
    from training.step3_ppo.contracts.settings import PpoSettings
    from training.utils.contracts.rollout_engine import RolloutEngine
    from training.utils.engine.whole_model import WholeModel


class Asking(NamedTuple):
    """The means by which a queue draws. lender: the trained model. of_step: what is asked for in a step; of_position:
    for the prompt at a position of the run. Both return the same whenever they are called."""

    settings: PpoSettings
    engine: RolloutEngine
    lender: WholeModel
    of_step: Callable[[int], Asked]
    of_position: Callable[[int], Asked]


class RolloutQueue:
    """Draws the rollouts of steps by weights that may be older than the newest. state_name: of its state in a
    checkpoint."""

    state_name = "rollout_queue"

    def take(self, step: int) -> RolloutsOfStep:
        """Return the rollouts of `step`, which trains next. A collective."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait until nothing is drawn any more: before anything else uses the engine."""

    def figures(self) -> dict[str, float]:
        """Return metrics of the rollouts taken last."""
        return {}

    def note_unused(self, events: RolloutEvents, reason: str) -> None:
        """Note what is drawn and not trained on, at the end of a run. A collective."""

    def state_dict(self) -> Any:
        """Return all ranks' rollouts that no step has trained on, as JSON holds them. A collective."""
        raise NotImplementedError

    def load_state_dict(self, state: Any) -> None:
        """Restore what `state_dict` returned, on any number of ranks."""
        raise NotImplementedError
