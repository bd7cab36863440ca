"""The flags of a run's trackers and of the lines that it prints. Cheap to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from training.utils.base.console import LogPace
from training.utils.flags.flags import flag
from training.utils.run.step_callback import load_callback
from training.utils.trackers.table import NO_TRACKERS, TRACKERS_HELP, check_tracker

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


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
