"""Finished models that the run's disk refuses: written once there is room, or else in the rescue folder; and the
checkpoint of a run that must stop.

Training has ended by then, and its weights are in this process alone. Nothing here ends it before they are written, or
every place has refused them.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from threestep.plugins.full_disks.room import check_room, free_bytes, in_gigabytes
from training.utils.base.console import log
from training.utils.base.errors import ThreestepError, in_words
from training.utils.checkpoints.interrupts import Interrupts
from training.utils.contracts.run import RunCourse

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 30.0


def open_course(settings: Mapping[str, Any]) -> RunCourse:
    """Return what writes for a run where its disk refuses."""
    return Rescue(settings)


class Rescue(RunCourse):
    """Reckons the room before the run. Waits --wait_for_disk_seconds in all, and then writes into a folder in
    --rescue_dir, or in the system's for temporary files."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._left_seconds, self._root = settings["wait_for_disk_seconds"], settings["rescue_dir"]
        self._rescue: Path | None = None

    def check(self, run: Path, parts: Any, keeps: int) -> None:
        check_room(run, self._settings, parts, keeps)

    def other_folder(self, run: Path) -> Path:
        return new_rescue_folder(self._root, run)

    def write_refused(self, place: Path, save: Callable[[Path], None], refusal: OSError) -> Path:
        still = self._wait(place, save, refusal)
        return place if still is None else self._rescued(place, save, still)

    def _wait(self, place: Path, save: Callable[[Path], None], refusal: OSError) -> OSError | None:
        """Try again, at once and then at growing intervals, until the time is over; return the last refusal."""
        log(
            f"warning: {place} cannot be written ({in_words(refusal)}; {_free(place)}); training has ended, and its "
            f"weights exist only in this process; retrying for {self._left_seconds:.0f} seconds "
            "(--wait_for_disk_seconds), so free up space now; Ctrl-C or SIGTERM ends the wait"
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
            log(f"the disk accepts writes again: {place} was written")
        return again

    def _rescued(self, place: Path, save: Callable[[Path], None], refusal: OSError) -> Path:
        try:
            self._rescue = self._rescue or new_rescue_folder(self._root, place.parent)
            save(self._rescue / place.name)
        except OSError as problem:
            raise ThreestepError(
                f"{place} cannot be written ({in_words(refusal)}), nor can --rescue_dir ({in_words(problem)}): the "
                "weights of the last step are lost; free up space and continue from the last checkpoint with "
                "--resume, if there is one"
            ) from problem
        log(f"warning: THE MODEL IS NOT IN {place.parent}, which cannot be written ({in_words(refusal)})")
        log(f"warning: it is in {self._rescue / place.name}; move it before that folder is cleaned up")
        return self._rescue / place.name


def new_rescue_folder(root: str | None, output_dir: Path) -> Path:
    """Make a new folder, for its owner alone, for what the run in `output_dir` cannot write there: in `root`, or in the
    system's folder for temporary files. OSError if that is refused."""
    run = "_".join(output_dir.absolute().parts[-2:]).strip(os.sep)
    return Path(tempfile.mkdtemp(prefix=f"threestep_{run}_", dir=Path(root or tempfile.gettempdir()).absolute()))


def _refusal_of(save: Callable[[Path], None], place: Path) -> OSError | None:
    try:
        save(place)
    except OSError as problem:
        return problem
    return None


def _free(place: Path) -> str:
    free = free_bytes(place)
    return "the free space there is unknown" if free is None else f"{in_gigabytes(free)} is free"


def _sleep(seconds: float, interrupts: Interrupts) -> None:
    """Sleep in short pieces, since a signal does not end time.sleep."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(KeyboardInterrupt):
        while interrupts.reason is None and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.5))
