"""The table of trackers by name, and how a flag's value becomes a tracker's class.

Cheap to import for `--help`: a tracker's module is imported when it is opened.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.base.tables import check_signature
from training.utils.base.user_files import is_address, load_named, named_object
from training.utils.plugins.plugin import TrackerEntry
from training.utils.plugins.registry import added, owner_sentence

if TYPE_CHECKING:
    from training.utils.contracts.trackers import Tracker


# It reads the run's folder; services, which send data away, are plugins', and are used on request alone.
TRACKERS = {
    "tensorboard": TrackerEntry(
        "training.utils.trackers.tensorboard:TensorBoard", "tensorboard", writes=("tensorboard/",)
    ),
}
TRACKERS |= added("trackers", TRACKERS)
FLAG = "--report_to"
NO_TRACKERS = "none"
TRACKERS_HELP = f"{', '.join(TRACKERS)}, your own Tracker as FILE.py:NAME"
KNOWN_AS = "tracker_runs.json"  # in the run's folder: the services' names for the run, for resuming
WRITTEN = (KNOWN_AS, *(name for entry in TRACKERS.values() for name in entry.writes))


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
    from training.utils.contracts.trackers import Tracker

    found = load_named(given, FLAG)
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        base = f"{Tracker.__module__}.Tracker"
        raise ThreestepError(f"{FLAG} expects '{given}' to be a subclass of {base}, got {found!r}; build it on that")
    if missing := sorted(found.__abstractmethods__):
        raise ThreestepError(f"{FLAG} expects '{given}' to define {', '.join(missing)}, got none; add it")
    check_signature(found, FLAG, given, ("run",))
    return found
