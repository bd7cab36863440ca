"""The models of a finished run on disk: in its folder, or where a part of its course writes what that refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from training.utils.base.errors import ThreestepError
from training.utils.engine.ranks.collectives import on_main

if TYPE_CHECKING:
    from training.utils.contracts.run import RunCourse
    from training.utils.engine.ranks.startup import Ranks


@dataclass
class FinalModels:
    """Writes models into OUTPUT_DIR. elsewhere: places of the models that it did not take, by name"""

    output_dir: Path
    course: Sequence[RunCourse]
    ranks: Ranks
    elsewhere: dict[str, Path] = field(default_factory=dict)

    def write(self, name: str, save: Callable[[Path], None]) -> None:
        """Call save(folder) on rank 0 for OUTPUT_DIR/name, or for the folders of `RunCourse.write_refused`. A
        collective. save raises OSError where the disk refuses, and leaves nothing half-written.

        ThreestepError, on every rank, if no place takes it.
        """
        place = on_main(lambda: self._written(self.output_dir / name, save), self.ranks.is_main, patient=True)
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

    def _written(self, place: Path, save: Callable[[Path], None]) -> Path:
        try:
            save(place)
        except OSError as refusal:
            tried = (part.write_refused(place, save, refusal) for part in self.course)
            found = next((written for written in tried if written is not None), None)
            if found is None:
                raise
            return found
        return place
