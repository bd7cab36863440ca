"""The source of a run's rollouts: the engine of --rollout_engine or what a plugin puts around it or in its place; the
decode loop and the scheduler, which a plugin may have. Without one, engines draw by their own loop, and the newest
weights draw each step's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training.step3_ppo.contracts.records import NO_CORRECTION, Correction
from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import named_object
from training.utils.generation.table import engine_class
from training.utils.plugins.registry import added, asked_for, hooks, one_at_most

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from training.step3_ppo.contracts.rollouts import Asking, RolloutQueue
    from training.step3_ppo.flags.algorithm import Algorithm
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.utils.base.errors import Mistakes
    from training.utils.contracts.decode_loops import AskedLoop
    from training.utils.contracts.media import RunMedia
    from training.utils.contracts.rollout_engine import RolloutEngine


def asked_loop(flags: PpoFlags, mistakes: Mistakes) -> AskedLoop | None:
    """Return the loop; None where engines draw by their own. Note values of flags that ask for none that there is.
    ThreestepError where two plugins would draw."""
    made = (named_object(place)(flags, mistakes) for place in added("decode_loops", ()).values())
    found = ((loop.name, loop) for loop in made if loop is not None)
    return one_at_most(found, "responses can be generated in only one way", "each set one")


def check_loop(loop: AskedLoop | None, given: str, engine: type[RolloutEngine] | None, mistakes: Mistakes) -> None:
    """Note what the loop does not go with. given: the engine's name; engine: None where it is unknown, as was noted."""
    if loop is None:
        return
    mistakes.require(
        engine is None or loop.fits(engine),
        f"--rollout_engine {given} does not support {loop.name} {loop.value}; remove it, or use another engine",
    )
    loop.check(mistakes)


class RolloutSource:
    """The engine itself. name, value: of the flag that asks for another source. draws: this run's own weights draw."""

    draws = True

    def __init__(self, name: str = "", value: Any = None) -> None:
        self.name, self.value = name, value

    def engine(self, create: Callable[[], RolloutEngine], *, rank: int, decides: Mapping[str, Any]) -> RolloutEngine:
        """Return what draws, or has drawn. create: makes the engine. decides: what else than the sampling decides the
        responses, by name, as JSON holds it."""
        return create()


def source_of(flags: PpoFlags) -> RolloutSource:
    """The source of a run's rollouts (`rollout_sources` of plugins). ThreestepError for two flags that name one."""
    name, place = asked_for("rollout_sources", flags.settings, "rollouts can have only one source")
    return RolloutSource() if place is None else named_object(place)(name, flags.settings[name])


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
    """Return the rollout scheduler of a plugin; None without one. Raise ThreestepError if there are two."""
    made = (make(flags) for make in hooks("rollout_scheduler"))
    found = ((type(scheduler).__name__, scheduler) for scheduler in made if scheduler is not None)
    return one_at_most(found, "rollouts can have only one scheduler", "each are one")


def draws_exactly(flags: PpoFlags) -> bool:
    """Return whether the newest weights generate the responses and compute their log-probabilities."""
    return engine_class(flags.ppo.rollout_engine).logprobs_are_trained_models and scheduler_of(flags) is None


def correction_of(flags: PpoFlags) -> Correction:
    """Return the correction of rollouts. Raise ThreestepError if there are two, or none and the run needs one."""
    named = ((f"--{name}", place) for name, place in added("corrections", ()).items())
    place = one_at_most(named, "rollouts can be corrected only once", "each correct them")
    if place is not None:
        return named_object(place)(flags)
    if not draws_exactly(flags):
        raise ThreestepError(
            "the loss needs a correction for responses from older weights or another engine, but no installed plugin "
            "has one; generate with --rollout_engine hf and the newest weights"
        )
    return NO_CORRECTION
