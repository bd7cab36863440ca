"""The trackers of a run: their flags, the table of their names, and their opening. Cheap to import for `--help`: a
tracker's module is imported when it is opened."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from training.utils.base.console import LogPace
from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.base.storage import read_json_object
from training.utils.base.user_files import check_signature, is_address, load_named, named_object
from training.utils.contracts.trackers import TrackedRun, Tracker
from training.utils.flags.flags import flag
from training.utils.plugins.plugin import TrackerEntry
from training.utils.plugins.registry import added, owner_sentence

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes

# It reads the run's folder; services, which send data away, are plugins', and are used on request alone.
TRACKERS = {
    "tensorboard": TrackerEntry("training.utils.run.tensorboard:TensorBoard", "tensorboard", writes=("tensorboard/",)),
}
TRACKERS |= added("trackers", TRACKERS)
FLAG = "--report_to"
NO_TRACKERS = "none"
TRACKERS_HELP = f"{', '.join(TRACKERS)}, your own Tracker as FILE.py:NAME"
KNOWN_AS = "tracker_runs.json"  # in the run's folder: the services' names for the run, for resuming
WRITTEN = (KNOWN_AS, *(name for entry in TRACKERS.values() for name in entry.writes))


@dataclass
class LogArguments:
    """Destinations of a run's metrics besides metrics.jsonl, which is always written, and the interval of its log."""

    topic: ClassVar[str] = "log"
    may_change: ClassVar[bool] = True

    report_to: str = flag(
        "tensorboard",
        f"Trackers that receive the metrics, separated by commas: {TRACKERS_HELP}; or {NO_TRACKERS}. Services read "
        "their own environment variables.",
        "names",
    )
    report_samples: int = flag(
        8,
        "Samples per evaluation. Steps 1 and 2: held-out rows, chosen by the seed, for samples.jsonl and trackers; 0 "
        "writes none. Step 3: prompts whose samples go to trackers; samples.jsonl has all of them.",
        "samples >= 0",
    )
    logging_seconds: float = flag(
        60.0,
        "Minimum time between progress lines if the output is not a terminal; 0: a line at every step. metrics.jsonl "
        "has every step.",
        "seconds >= 0",
    )

    def pace(self) -> LogPace:
        return LogPace(self.logging_seconds)

    def validate(self, mistakes: Mistakes) -> None:
        """Collect unknown trackers and missing packages."""
        names = [word.strip() for word in self.report_to.split(",")]
        for name in names:
            if names != [NO_TRACKERS]:
                mistakes.note(check_tracker, name)


def trackers_in(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in a run's --report_to, each once."""
    words = str(settings.get("report_to", LogArguments.report_to)).split(",")
    return tuple(dict.fromkeys(word.strip() for word in words if word.strip() != NO_TRACKERS))


def check_tracker(given: str) -> None:
    """Raise ThreestepError if there is no such tracker, if its package is missing, or if FILE.py:NAME is not one."""
    if is_address(given):
        tracker_class(given)
    elif given not in TRACKERS:
        hint = owner_sentence("trackers", given) or nearest_names(given, TRACKERS)
        raise ThreestepError(
            f"{FLAG} expects {TRACKERS_HELP}, separated by commas, or {NO_TRACKERS} alone, got '{given}'{hint}"
        )
    elif (package := TRACKERS[given].package) is not None and importlib.util.find_spec(package) is None:
        raise ThreestepError(f"{FLAG} {given} needs the package {package}: pip install {package}")


def tracker_class(given: str) -> type[Tracker]:
    """Return the class of a name, or of a FILE.py:NAME; ThreestepError if that is not a tracker that can be opened."""
    if not is_address(given):
        return named_object(TRACKERS[given].place)
    found = load_named(given, FLAG)
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        base = f"{Tracker.__module__}.Tracker"
        raise ThreestepError(f"{FLAG} expects '{given}' to be a subclass of {base}, got {found!r}; derive it from that")
    if missing := sorted(found.__abstractmethods__):
        raise ThreestepError(f"{FLAG} expects '{given}' to define {', '.join(missing)}; add what is missing")
    check_signature(found, FLAG, given, ("run",))
    return found


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
                f"{FLAG} {name}: the tracker cannot be opened ({type(problem).__name__}: "
                f"{' '.join(str(problem).split())}); set it up as its documentation describes, or remove it"
            ) from problem
        if made[-1].known_as is not None:
            known[name] = made[-1].known_as
    if known:
        (folder / KNOWN_AS).write_text(json.dumps(known) + "\n", encoding="utf-8")
    return made
