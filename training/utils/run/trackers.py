"""Those who get a run's figures: trackers, by the table of their names, and the user's callback; and the flags of both.
Cheap to import for `--help`: a tracker's module is imported when it is opened."""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from training.utils.base.console import LogPace
from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.base.storage import read_json_object
from training.utils.base.user_files import call_user, check_signature, is_address, load_named, named_object
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
CALLBACK_FLAG = "--callback"
STOP = "stop"
_NAMED_HERE = ("step", "seconds")
_OF_TRAINERS = ("on_step_end", "on_log", "on_train_begin")  # methods of transformers' TrainerCallback


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
        "Samples of each evaluation. Steps 1 and 2: held-out rows, drawn by the seed, that samples.jsonl and trackers "
        "get; 0 writes none. Step 3, whose samples.jsonl has all: those of the first prompts, which trackers get.",
        "samples >= 0",
    )
    callback: str | None = flag(
        None,
        "Function that is called as fn(step, figures) with the figures of each step and evaluation, on the main rank: "
        'returns None, "stop" (training ends after this step, with its model) or further figures as a dict.',
        "file.py:name",
    )
    logging_seconds: float = flag(
        60.0,
        "The fewest seconds between two lines of progress where the output is not a terminal; 0: a line every step. "
        "metrics.jsonl has every step.",
        "seconds >= 0",
    )

    def pace(self) -> LogPace:
        return LogPace(self.logging_seconds)

    def validate(self, mistakes: Mistakes) -> None:
        """Collect unknown trackers, missing packages, and a callback that is none."""
        if self.callback is not None:
            mistakes.note(load_callback, self.callback)
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
        raise ThreestepError(f"{FLAG} expects '{given}' to be a subclass of {base}, got {found!r}; build it on that")
    if missing := sorted(found.__abstractmethods__):
        raise ThreestepError(f"{FLAG} expects '{given}' to define {', '.join(missing)}, got none; add it")
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
                f"{FLAG} {name}: it cannot be opened ({type(problem).__name__}: "
                f"{' '.join(str(problem).split())}); set it up as its documentation says, or leave it out"
            ) from problem
        if made[-1].known_as is not None:
            known[name] = made[-1].known_as
    if known:
        (folder / KNOWN_AS).write_text(json.dumps(known) + "\n", encoding="utf-8")
    return made


def load_callback(given: str) -> Callable[..., Any]:
    """Return the function of --callback; ThreestepError if it cannot be called as one."""
    function = load_named(given, CALLBACK_FLAG)
    check_callback(function)
    return function


def check_callback(function: Any) -> None:
    """ThreestepError unless `function` can be called with (step, figures)."""
    kind = f"the class {function.__name__}" if isinstance(function, type) else _described(function)
    problem = None
    if any(hasattr(function, method) for method in _OF_TRAINERS):
        problem = f"{kind}, a callback of transformers' Trainer"
    elif isinstance(function, type) or not callable(function):
        problem = kind
    else:
        try:
            inspect.signature(function).bind(0, {})
        except TypeError as other:
            problem = f"{kind}, which takes other arguments ({other})"
        except ValueError:  # a built-in function without a signature
            pass
    if problem is not None:
        raise ThreestepError(
            f"{CALLBACK_FLAG} expects a function (step, figures), called with each step's figures, got {problem}; "
            f'write `def follow(step, figures): ...`, which returns "{STOP}" to end training'
        )


def _described(function: Any) -> str:
    name = getattr(function, "__name__", "")
    return name if callable(function) and name else f"an object of {type(function).__name__}"


class StepCallback:
    """Calls `function(step, figures)`. Its mistakes are kept, for all ranks to end with (`problem`).

    stops: it returned "stop"
    """

    def __init__(self, function: Callable[[int, dict[str, float]], Any]) -> None:
        self._function = function
        self.stops = False
        self.problem: str | None = None

    def figures(self, step: int, figures: Mapping[str, float]) -> dict[str, float]:
        """Call it; return the figures that it adds to the step's."""
        if self.problem is not None:
            return {}
        try:
            return self._read(call_user(self._function, step, dict(figures)), figures)
        except ThreestepError as mistake:
            self.problem = f"{CALLBACK_FLAG}: {mistake}"
            return {}

    def _read(self, answer: Any, figures: Mapping[str, float]) -> dict[str, float]:
        if answer is None:
            return {}
        if isinstance(answer, str) and answer == STOP:
            self.stops = True
            return {}
        if not isinstance(answer, Mapping):
            raise ThreestepError(
                f'the function expects to return None, "{STOP}" or figures as a dict, got {answer!r:.60}; leave out '
                "other returns"
            )
        for name, value in answer.items():
            if not isinstance(name, str) or isinstance(value, bool) or not isinstance(value, Real):
                raise ThreestepError(f"figures expect numbers by name, got {name!r}: {value!r:.60}")
            if name in figures or name in _NAMED_HERE:
                raise ThreestepError(f"figures expect names of their own, got '{name}', which the step has; rename it")
        return {name: float(value) if math.isfinite(value) else math.nan for name, value in answer.items()}
