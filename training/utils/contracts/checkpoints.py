"""Checkpoints as a training loop sees them; and who has a say in a run's course: when it saves, stops and
ends, with whose weights, and where it writes what its disk refuses. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path


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
        """Note that the run was evaluated after `step` (0: before training), and its figures are written. `due` may
        then ask for a checkpoint, and `ends` for the end. A collective."""

    def load_final(self, step: int) -> dict[str, Any] | None:
        """At the end of the run, after `step`: load an earlier checkpoint whose weights the run ends with, if a plugin
        asks for one, and return the state that the loop gave to `save` then. A collective."""
        return None


class FinalWeights(NamedTuple):
    """Weights that a run ends with in place of the last ones: those of the checkpoint after `step`. why: such as "the
    best by its evaluations"."""

    step: int
    why: str


class RunCourse:
    """A say in a run's course; this one says nothing. Opened on all ranks, and called on the main rank alone, whose
    answers hold for all.

    keeps: checkpoints that stay beside those of --keep_last, at most
    judges: it goes by evaluations; otherwise `evaluated`, `end_reason` and `final`, which cost a collective, are not
        called
    """

    keeps: int = 0
    judges: bool = False

    def check(self, run: Path, parts: Any, keeps: int) -> None:
        """ThreestepError for a run that could not end, before its first step. parts: what it trains and saves
        (`checkpoints.parts`). keeps: of all who have a say"""

    def resumed(self, state: Mapping[str, Any]) -> None:
        """Continue a run that resumes. state: as `state` returned it, beside that of others; none of a part that the
        run did not have"""

    def evaluated(self, step: int, figures: Mapping[str, float]) -> bool:
        """Take the figures of the evaluation after `step` (0: before training); return whether a checkpoint of it is to
        be written. ThreestepError where they lack what is needed."""
        return False

    def stop_reason(self) -> str | None:
        """Return why the run must stop now, with a checkpoint of this step; None: it continues. Called after every
        step."""
        return None

    def end_reason(self) -> str | None:
        """Return why training ends now, although steps are left; None: it continues."""
        return None

    def kept(self, step: int) -> int | None:
        """Return the step whose checkpoint stays, once that of `step` is written; None: none does."""
        return None

    def state(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint of `step` holds of it, as JSON, by names of its own."""
        return {}

    def saved(self, step: int) -> None:
        """Note that a checkpoint of `step` was written."""

    def final(self, step: int) -> FinalWeights | None:
        """Return the weights that the run ends with, in place of those after `step`, its last one."""
        return None

    def other_folder(self, run: Path) -> Path | None:
        """Return a new folder for a checkpoint that the run's own folder refuses; None: there is none. OSError if that
        is refused too."""
        return None

    def write_refused(self, place: Path, save: Callable[[Path], None], refusal: OSError) -> Path | None:
        """Write a finished model that the disk refused at `place`, later or elsewhere, by save(its folder); return that
        folder. None: it is not written. ThreestepError where no place takes it."""
        return None
