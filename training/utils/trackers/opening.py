"""The trackers of a run, opened. Only the MetricsWriter calls them, on rank 0."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from training.utils.base.errors import ThreestepError
from training.utils.base.storage import read_json_object
from training.utils.contracts.trackers import TrackedRun, Tracker
from training.utils.trackers.arguments import LogArguments
from training.utils.trackers.table import FLAG, KNOWN_AS, tracker_class


def open_trackers(names: Sequence[str], folder: Path, settings: Mapping[str, Any], done_steps: int) -> list[Tracker]:
    """Open the trackers `names`. done_steps: of a resumed run, which continues under the same name in each service.

    ThreestepError if one cannot be opened: better now than after days of training that it did not record.
    """
    if not done_steps:
        (folder / KNOWN_AS).unlink(missing_ok=True)  # an earlier run's in the same folder
    known = read_json_object(str(folder / KNOWN_AS)) or {}
    most = int(settings.get("report_samples", LogArguments.report_samples))
    made: list[Tracker] = []
    for name in names:
        try:
            made.append(tracker_class(name)(TrackedRun(folder, settings, most, done_steps, known.get(name))))
        except Exception as problem:  # (each package has its exceptions)
            raise ThreestepError(
                f"{FLAG} {name}: it cannot be opened ({type(problem).__name__}: "
                f"{' '.join(str(problem).split())}); set it up as its documentation says, or leave it out"
            ) from problem
        if made[-1].known_as is not None:
            known[name] = made[-1].known_as
    if known:
        (folder / KNOWN_AS).write_text(json.dumps(known) + "\n", encoding="utf-8")
    return made
