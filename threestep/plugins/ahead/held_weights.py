"""The weights that an engine of its own holds, one version at a time, for groups that are drawn as they end.

It takes others once no group is being drawn, on any rank: none is cut, and none changes its weights on its way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.utils.engine.ranks.collectives import OwnRanks

if TYPE_CHECKING:
    from threestep.plugins.ahead.kept_model import KeptModel
    from training.utils.contracts.rollout_engine import RolloutEngine


class HeldWeights:
    """version: steps that they have taken; None before the first. each: all that are given are held in turn, as a
    schedule wants it; otherwise the newest."""

    def __init__(self, engine: RolloutEngine, *, each: bool) -> None:
        self._engine, self._each = engine, each
        self._ranks = OwnRanks()
        self._given: list[tuple[int, KeptModel]] = []
        self.version: int | None = None

    @property
    def is_behind(self) -> bool:
        return bool(self._given)

    def give(self, version: int, kept: KeptModel) -> None:
        """Have these weights held next."""
        if version != self.version:
            self._given = [*(self._given if self._each else ()), (version, kept)]

    def change(self) -> int:
        """Have the engine hold what the first rank was given; return the version. A collective of threads in which
        nothing is drawn. Another rank may be given it later, before it trains on what these weights drew."""
        version, kept = self._given[0]
        version = self._ranks.from_first(version)
        with self._engine.lent(kept):
            pass  # it keeps them
        return version

    def changed(self, version: int) -> None:
        """Note what `change` returned."""
        self.version = version
        self._given = [each for each in self._given if each[0] > version]
