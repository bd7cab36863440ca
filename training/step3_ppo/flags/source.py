"""The source of a run's rollouts: --rollout_engine, or what a plugin puts around it or in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import named_object
from training.utils.plugins.registry import added

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from training.step3_ppo.flags.ppo_flags import PpoFlags
    from training.utils.contracts.rollout_engine import RolloutEngine


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
    """Return the source of a run's rollouts (`rollout_sources` of plugins). ThreestepError for two flags that name
    one."""
    settings, kinds = flags.settings, added("rollout_sources", ())
    found = [name for name in kinds if settings.get(name) is not None]
    if len(found) > 1:
        raise ThreestepError(f"rollouts have one source, and --{' and --'.join(found)} each name one; leave one out")
    return named_object(kinds[found[0]])(found[0], settings[found[0]]) if found else RolloutSource()
