"""Checkpoints as a training loop sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Checkpoints:
    """Saves nothing: for a loop by itself, as in tests; `checkpoints.loop` has those of a run."""

    def restore(self) -> tuple[int, dict[str, Any]]:
        """Load the checkpoint that the run resumes from. Return how many steps are done, and the state that the loop
        gave to `save` then; 0 and nothing at the beginning of a run. A collective."""
        return 0, {}

    def ends(self, step: int) -> bool:
        """True if training ends after `step`, although steps are left: the same answer on every rank. To be called
        after the step, and again after an evaluation of it. A collective."""
        return False

    def due(self, step: int, total_steps: int) -> bool:
        """True if the loop must call `save` after `step`: the same answer on every rank. A collective."""
        return False

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Write a checkpoint after `step`; if the run was asked to stop, end the program with code 0. `state` is the
        loop's own, as JSON holds it, the same on every rank. A collective."""

    def evaluated(self, step: int) -> None:
        """Note that the run was evaluated after `step` (0: before training), and its figures are written. If they are
        the best so far, and that is asked for, `due` says so. A collective."""

    def load_best(self, step: int) -> dict[str, Any] | None:
        """At the end of the run, after `step`: load the best evaluation's checkpoint if it is asked for and an earlier
        one, and return the state that the loop gave to `save` then. A collective."""
        return None
