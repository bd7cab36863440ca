"""The flags of a run's trackers and of the report at its end. Cheap to import."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from training.utils.base.console import LogPace
from training.utils.flags.flags import flag
from training.utils.report.trackers.table import NO_TRACKERS, TRACKERS_HELP, check_tracker
from training.utils.run.step_callback import load_callback

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


@dataclass
class ReportArguments:
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
    harness_tasks: list[str] = flag(
        [],
        "Task files of lm-evaluation-harness (FILE.yaml), evaluated beside each evaluation of the language model that "
        "is trained; their figures are eval/TASK_METRIC.",
        "files",
        topic="evaluation",
    )
    harness_rows: int | None = flag(
        None, "With --harness_tasks: only the first rows of each task.", "rows >= 1", topic="evaluation"
    )
    callback: str | None = flag(
        None,
        "Function that is called as fn(step, figures) with the figures of each step and evaluation, on the main rank: "
        'returns None, "stop" (training ends after this step, with its model) or further figures as a dict.',
        "file.py:name",
    )
    report: bool = flag(True, "Write OUTPUT_DIR/report.html at the end of the run.")
    push_to_hub: bool = flag(False, "Upload OUTPUT_DIR/model with its card to the hub at the end of the run.")
    hub_model_id: str | None = flag(
        None,
        "With --push_to_hub: the repository, OWNER/NAME; made if there is none. Default: the name of --output_dir, in "
        "the account that is logged in.",
    )
    hub_private_repo: bool | None = flag(
        None, "With --push_to_hub: make the repository private; default: the organization's."
    )
    logging_steps: int = flag(
        1,
        "Where the output is not a terminal: the fewest steps (step 3: rollouts) between two lines of progress. A line "
        "also waits for --logging_seconds; metrics.jsonl has every step.",
        "steps >= 1",
    )
    logging_seconds: float = flag(
        60.0,
        "The fewest seconds between two lines of progress where the output is not a terminal; 0: a line every "
        "--logging_steps.",
        "seconds >= 0",
    )

    def pace(self) -> LogPace:
        return LogPace(self.logging_steps, self.logging_seconds)

    def validate(self, mistakes: Mistakes) -> None:
        """Collect unknown trackers, missing packages, and an upload without a name."""
        mistakes.require(
            self.push_to_hub or not self.hub_model_id,
            f"--hub_model_id {self.hub_model_id} is of --push_to_hub, which is off; give it too, or leave it out",
        )
        if self.callback is not None:
            mistakes.note(load_callback, self.callback)
        check_tasks(mistakes, self.harness_tasks, self.harness_rows)
        names = [word.strip() for word in self.report_to.split(",")]
        for name in names:
            if names != [NO_TRACKERS]:
                mistakes.note(check_tracker, name)


def check_tasks(mistakes: Mistakes, tasks: Sequence[str], rows: int | None) -> None:
    """Collect task files that there are not, a bound without tasks, and a package that is missing."""
    mistakes.require(bool(tasks) or rows is None, f"--harness_rows {rows} is of --harness_tasks; give both or neither")
    for name in tasks:
        mistakes.require(
            name.endswith((".yaml", ".yml")) and Path(name).is_file(),
            f"--harness_tasks expects task files (FILE.yaml) on this disk, got '{name}'; `threestep evaluate harness` "
            "takes the names of public tasks too",
        )
    mistakes.require(
        not tasks or importlib.util.find_spec("lm_eval") is not None,
        "--harness_tasks needs the package lm_eval, which is not installed; run: pip install threestep[harness]",
    )


def trackers_in(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in a run's --report_to, each once."""
    words = str(settings.get("report_to", ReportArguments.report_to)).split(",")
    return tuple(dict.fromkeys(word.strip() for word in words if word.strip() != NO_TRACKERS))
