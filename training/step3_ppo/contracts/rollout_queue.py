"""Which weights draw the rollouts of a step: the newest, unless a plugin has a queue of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from training.utils.base.errors import ThreestepError
from training.utils.plugins.registry import hooks

if TYPE_CHECKING:
    from training.step3_ppo.contracts.settings import PpoSettings
    from training.step3_ppo.flags.algorithm import Algorithm
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.step3_ppo.parts.rollout_events import RolloutEvents
    from training.utils.base.errors import Mistakes
    from training.utils.contracts.media import RunMedia
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rollout_engine import RolloutEngine, RolloutRequest, ServerShare
    from training.utils.data.rows.collate import PromptBatch
    from training.utils.engine.whole_model import WholeModel


class Asked(NamedTuple):
    """The prompts of a step's rollouts on this rank, one entry for each of them, and what is asked for them."""

    prompts: Sequence[PromptBatch]
    requests: Sequence[RolloutRequest]


class Times(NamedTuple):
    """Seconds since 1970: when a step's rollouts were asked for, and when drawing began and ended on this rank."""

    asked: float
    began: float
    ended: float


@dataclass(frozen=True)
class RolloutsOfStep:
    """The rollouts of a step on this rank. version: steps that the weights had taken, the oldest where they differ.
    waited: seconds of the loop. times: None where a checkpoint had the rollouts. groups: position and version of each
    prompt, where they are no function of the step; pending: positions that wait for the steps to come. shares: of the
    servers that drew them, without those that a checkpoint had."""

    step: int
    version: int
    prompts: Sequence[PromptBatch]
    rollouts: Sequence[Rollout]
    waited: float = 0.0
    times: Times | None = None
    groups: Sequence[tuple[int, int]] = ()
    pending: Sequence[int] = ()
    shares: Mapping[str, ServerShare] = field(default_factory=dict)


class Asking(NamedTuple):
    """What a queue draws with. lender: the trained model. of_step: what is asked for in a step; of_position: for the
    prompt at a position of the run. Both return the same whenever they are called."""

    settings: PpoSettings
    engine: RolloutEngine
    lender: WholeModel
    of_step: Callable[[int], Asked]
    of_position: Callable[[int], Asked]


class RolloutQueue:
    """Draws the rollouts of steps by weights that may be older than the newest."""

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
