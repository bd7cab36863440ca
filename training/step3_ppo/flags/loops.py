"""The decode loop that a run's flags ask for, which a plugin may have: without one, engines draw by their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import named_object
from training.utils.plugins.registry import added

if TYPE_CHECKING:
    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.utils.base.errors import Mistakes
    from training.utils.contracts.decode_loops import AskedLoop
    from training.utils.contracts.rollout_engine import RolloutEngine


def asked_loop(flags: PpoFlags, mistakes: Mistakes) -> AskedLoop | None:
    """Return the loop; None where engines draw by their own. Note values of flags that ask for none that there is.
    ThreestepError where two plugins would draw."""
    made = (named_object(place)(flags, mistakes) for place in added("decode_loops", ()).values())
    found = [loop for loop in made if loop is not None]
    if len(found) > 1:
        names = " and ".join(loop.name for loop in found)
        raise ThreestepError(f"responses are drawn in one way, and {names} would each draw them; leave one out")
    return next(iter(found), None)


def check_loop(loop: AskedLoop | None, given: str, engine: type[RolloutEngine] | None, mistakes: Mistakes) -> None:
    """Note what the loop does not go with. given: the engine's name; engine: None where it is unknown, which was
    noted."""
    if loop is None:
        return
    mistakes.require(
        engine is None or loop.fits(engine),
        f"--rollout_engine {given} does not support {loop.name}, got {loop.value}; leave it out or use another engine",
    )
    loop.check(mistakes)
