"""The models of a finished run on disk: in its folder, once there is room, or else in the rescue folder.

Training is over then, and its weights are in this process alone. Nothing here ends it before they are written, or
every place has refused them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from training.utils.base.console import log
from training.utils.base.errors import ThreestepError, in_words
from training.utils.base.storage import new_rescue_folder
from training.utils.checkpoints.interrupts import Interrupts
from training.utils.engine.ranks.collectives import on_main
from training.utils.outputs.room import free_bytes, in_gigabytes

if TYPE_CHECKING:
    from training.utils.checkpoints.arguments import CheckpointArguments
    from training.utils.engine.ranks.startup import Ranks

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0


@dataclass
class FinalModels:
    """Writes models into OUTPUT_DIR, waiting --wait_for_disk_seconds in all, then into --rescue_dir.

    elsewhere: places of the models that OUTPUT_DIR did not take, by name
    """

    output_dir: Path
    flags: CheckpointArguments
    ranks: Ranks
    elsewhere: dict[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._left_seconds = self.flags.wait_for_disk_seconds
        self._rescue: Path | None = None

    def write(self, name: str, save: Callable[[Path], None]) -> None:
        """Call save(folder) on rank 0 for OUTPUT_DIR/name until the disk takes it, then for a folder to rescue it to. A
        collective. save raises OSError where the disk refuses, and leaves nothing half-written.

        ThreestepError, on every rank, if no place takes it.
        """
        place = on_main(lambda: self._written(name, save), self.ranks.is_main, patient=True)
        if place != self.output_dir / name:
            self.elsewhere[name] = place

    def check(self) -> None:
        """At the end of a run: ThreestepError if a model is not where it belongs."""
        if self.elsewhere:
            moves = "; ".join(f"mv {place} {self.output_dir / name}" for name, place in self.elsewhere.items())
            raise ThreestepError(
                f"the run is trained, but {self.output_dir} did not take {' and '.join(self.elsewhere)}: free space "
                f"there, then {moves}"
            )

    def _written(self, name: str, save: Callable[[Path], None]) -> Path:
        place = self.output_dir / name
        refusal = _refusal_of(save, place)
        if refusal is not None:
            refusal = self._wait(place, save, refusal)
        return place if refusal is None else self._rescued(name, save, refusal)

    def _wait(self, place: Path, save: Callable[[Path], None], refusal: OSError) -> OSError | None:
        """Try again, at once and then at growing intervals, until the time is over; return the last refusal."""
        log(
            f"warning: {place} cannot be written ({in_words(refusal)}; {_free(place)}); training is over, and its "
            f"weights are in this process alone: trying again for {self._left_seconds:.0f} seconds "
            "(--wait_for_disk_seconds), so free space now; Ctrl-C or SIGTERM ends the wait"
        )
        again = _refusal_of(save, place)  # an error of the moment
        pause = _FIRST_PAUSE_SECONDS
        with Interrupts(alone=False, follows="no longer waiting for the disk") as interrupts:
            while again is not None and self._left_seconds > 0 and interrupts.reason is None:
                started = time.monotonic()
                _sleep(min(pause, self._left_seconds), interrupts)
                again = _refusal_of(save, place)
                self._left_seconds -= time.monotonic() - started
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            if interrupts.reason is not None:
                self._left_seconds = 0.0
        if again is None:
            log(f"the disk takes it now: {place} is written")
        return again

    def _rescued(self, name: str, save: Callable[[Path], None], refusal: OSError) -> Path:
        try:
            self._rescue = self._rescue or new_rescue_folder(self.flags.rescue_dir, self.output_dir)
            save(self._rescue / name)
        except OSError as problem:
            raise ThreestepError(
                f"{self.output_dir / name} cannot be written ({in_words(refusal)}), nor can --rescue_dir "
                f"({in_words(problem)}): the weights of the last step are lost; free space and continue from the last "
                "checkpoint by --resume, if there is one"
            ) from problem
        log(f"warning: THE MODEL IS NOT IN {self.output_dir}, which refuses it ({in_words(refusal)})")
        log(f"warning: it is in {self._rescue / name}; move it before that folder is cleaned")
        return self._rescue / name


def _refusal_of(save: Callable[[Path], None], place: Path) -> OSError | None:
    try:
        save(place)
    except OSError as problem:
        return problem
    return None


def _free(place: Path) -> str:
    free = free_bytes(place)
    return "the room there is unknown" if free is None else f"{in_gigabytes(free)} are free"


def _sleep(seconds: float, interrupts: Interrupts) -> None:
    """Sleep in short pieces, since a signal does not end time.sleep."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(KeyboardInterrupt):
        while interrupts.reason is None and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.5))
