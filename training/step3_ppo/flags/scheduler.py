"""The scheduler of a run's rollouts, which a plugin may have: without one, the newest weights draw each step's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError
from training.utils.plugins.registry import hooks

if TYPE_CHECKING:
    from training.step3_ppo.contracts.rollout_queue import Asking, RolloutQueue
    from training.step3_ppo.flags.algorithm import Algorithm
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.utils.base.errors import Mistakes
    from training.utils.contracts.media import RunMedia
    from training.utils.contracts.rollout_engine import RolloutEngine


class RolloutScheduler:
    """The settings of a queue, as `Hooks.rollout_scheduler` makes them of a run's flags."""

    def check(self, algorithm: Algorithm, mistakes: Mistakes) -> None:
        """Note flags that need the newest weights to draw."""

    def check_run(
        self, engine: type[RolloutEngine], media: RunMedia | None, *, rollouts: int, prompts_of_step: int, ranks: int
    ) -> None:
        """Raise ThreestepError for a run that cannot draw so. media: of its prompts. rollouts: of the run.
        prompts_of_step: of all ranks."""

    def kept_versions(self, engine: type[RolloutEngine], beside_training: bool) -> int:
        """Return how many versions of the weights are kept for drawing, at most. beside_training: False where a step's
        rollouts are drawn before it trains."""
        return 0

    def wanted(self) -> dict[str, Any]:
        """Return flags with their values that an engine must support (`supports_NAME`)."""
        return {}

    def open(self, asking: Asking) -> RolloutQueue:
        """Return the queue of a run. A collective."""
        raise NotImplementedError


def scheduler_of(flags: PpoFlags) -> RolloutScheduler | None:
    """Return what decides which weights draw; None where the newest do. ThreestepError where two plugins would."""
    found = [scheduler for make in hooks("rollout_scheduler") if (scheduler := make(flags)) is not None]
    if len(found) > 1:
        kinds = " and ".join(type(each).__name__ for each in found)
        raise ThreestepError(f"rollouts are drawn in one order, and {kinds} would each decide about it; leave one out")
    return next(iter(found), None)
