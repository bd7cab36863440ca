"""Rollouts that are written beside an engine, or read in its place. Cheap to import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from training.step3_ppo.flags.rollout_choices import RolloutSource

if TYPE_CHECKING:
    from training.utils.contracts.rollout_engine import RolloutEngine


class Dumped(RolloutSource):
    """The engine's rollouts, which are also written to a folder."""

    def engine(self, create: Callable[[], RolloutEngine], *, rank: int, decides: Mapping[str, Any]) -> RolloutEngine:
        from threestep.plugins.replay.files import DumpingRollout

        return DumpingRollout(create(), self.value, rank, decides)


class Replayed(RolloutSource):
    """The rollouts of a folder."""

    draws = False

    def engine(self, create: Callable[[], RolloutEngine], *, rank: int, decides: Mapping[str, Any]) -> RolloutEngine:
        from threestep.plugins.replay.files import ReplayRollout

        return ReplayRollout(self.value, rank, decides)
