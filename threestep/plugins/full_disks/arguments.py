"""The flags of disks that refuse. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from training.utils.flags.flags import flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

MOST_WAIT_SECONDS = 12 * 3600.0  # other ranks wait a day for the first one


@dataclass
class FullDiskArguments:
    """Waits and places for what the run's disk refuses."""

    topic: ClassVar[str] = "checkpoints"
    may_change: ClassVar[bool] = True

    wait_for_disk_seconds: float = flag(
        600.0,
        "How long a finished run keeps trying to write its model to disk; after that, the model goes to --rescue_dir. "
        "Ctrl-C and SIGTERM end the wait.",
        f"0 <= seconds < {MOST_WAIT_SECONDS:g}",
    )
    rescue_dir: str | None = flag(
        None,
        "Folder for the model of a finished run, and for the checkpoint of a run that is stopped, if they cannot be "
        "written to OUTPUT_DIR; default: the system's folder for temporary files (TMPDIR, or /tmp).",
        "folder",
    )

    def validate(self, mistakes: Mistakes) -> None:
        """Collect mistakes in these settings."""
        if self.rescue_dir is not None:
            place = self.rescue_dir
            mistakes.require(
                os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK),
                f"--rescue_dir expects a writable folder, got {place}; create it, or choose another",
            )
