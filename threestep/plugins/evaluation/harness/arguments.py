"""The flags of `evaluate harness`, and of tasks beside a run's evaluations. Cheap to import for `--help`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from training.utils.flags.flags import flag

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


@dataclass
class HarnessArguments:
    """Tasks of lm-evaluation-harness."""

    topic: ClassVar[str] = "evaluation"

    tasks: list[str] = flag(
        [], "harness: tasks of lm-evaluation-harness, by name or as a task file (FILE.yaml).", "names"
    )
    tasks_path: str | None = flag(None, "harness: a folder of task files of yours, which --tasks names.", "folder")
    num_fewshot: int | None = flag(
        None, "harness: solved examples before each question; default: each task's own.", "rows >= 0"
    )
    task_rows: int | None = flag(None, "harness: evaluate only the first rows of each task.", "rows >= 1")

    def validate(self, mistakes: Mistakes) -> None:
        if not self.tasks:
            for name in ("tasks_path", "num_fewshot", "task_rows"):
                given = getattr(self, name)
                mistakes.require(given is None, f"--{name} {given} is for --tasks, which names none; leave it out")


@dataclass
class RunTaskArguments:
    """Tasks of lm-evaluation-harness beside the evaluations of a run."""

    topic: ClassVar[str] = "evaluation"
    may_change: ClassVar[bool] = True

    harness_tasks: list[str] = flag(
        [],
        "Task files of lm-evaluation-harness (FILE.yaml), evaluated beside each evaluation of the language model that "
        "is trained; their figures are eval/TASK_METRIC.",
        "files",
    )
    harness_rows: int | None = flag(None, "With --harness_tasks: only the first rows of each task.", "rows >= 1")

    def validate(self, mistakes: Mistakes) -> None:
        """Collect task files that there are not, a bound without tasks, and a package that is missing."""
        tasks, rows = self.harness_tasks, self.harness_rows
        mistakes.require(
            bool(tasks) or rows is None, f"--harness_rows {rows} is for --harness_tasks; give both or neither"
        )
        for name in tasks:
            mistakes.require(
                name.endswith((".yaml", ".yml")) and Path(name).is_file(),
                f"--harness_tasks expects task files (FILE.yaml) on this disk, got '{name}'; `threestep evaluate "
                "harness` takes the names of public tasks too",
            )
        mistakes.require(
            not tasks or importlib.util.find_spec("lm_eval") is not None,
            "--harness_tasks needs the package lm_eval, which is not installed; run: pip install threestep[harness]",
        )


def check_run_tasks(flags: Any, mistakes: Mistakes) -> None:
    """Note tasks of a step that trains no language model. flags: of a step; those of step 3 name none."""
    scores = getattr(getattr(flags, "step", None), "kind", "") == "reward"
    mistakes.require(
        not scores or not flags.added.of(RunTaskArguments).harness_tasks,
        "--harness_tasks asks a language model, and step 2 trains a reward model; leave it out",
    )
