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

    tasks: list[str] = flag([], "harness: lm-evaluation-harness tasks, by name or as task files (FILE.yaml).", "names")
    tasks_path: str | None = flag(
        None, "harness: a folder of your own task files, which --tasks can then name.", "folder"
    )
    num_fewshot: int | None = flag(
        None, "harness: solved examples before each question (few-shot); default: the task's own setting.", "rows >= 0"
    )
    task_rows: int | None = flag(None, "harness: evaluate only the first N rows of each task.", "rows >= 1")

    def validate(self, mistakes: Mistakes) -> None:
        if not self.tasks:
            for name in ("tasks_path", "num_fewshot", "task_rows"):
                given = getattr(self, name)
                mistakes.require(given is None, f"--{name} {given} needs --tasks; add --tasks, or remove --{name}")


@dataclass
class RunTaskArguments:
    """Tasks of lm-evaluation-harness beside the evaluations of a run."""

    topic: ClassVar[str] = "evaluation"
    may_change: ClassVar[bool] = True

    harness_tasks: list[str] = flag(
        [],
        "lm-evaluation-harness task files (FILE.yaml), run at each evaluation of the trained language model; results "
        "are logged as eval/TASK_METRIC.",
        "files",
    )
    harness_rows: int | None = flag(None, "With --harness_tasks: use only the first N rows of each task.", "rows >= 1")

    def validate(self, mistakes: Mistakes) -> None:
        """Collect task files that there are not, a bound without tasks, and a package that is missing."""
        tasks, rows = self.harness_tasks, self.harness_rows
        mistakes.require(
            bool(tasks) or rows is None, f"--harness_rows {rows} needs --harness_tasks; use both or neither"
        )
        for name in tasks:
            mistakes.require(
                name.endswith((".yaml", ".yml")) and Path(name).is_file(),
                f"--harness_tasks expects local task files (FILE.yaml), got '{name}'; for public task names run "
                "`threestep evaluate harness`",
            )
        mistakes.require(
            not tasks or importlib.util.find_spec("lm_eval") is not None,
            "--harness_tasks needs the package lm_eval, which is not installed; in the "
            "checkout, run pip install -e '.[harness]'",
        )


def check_run_tasks(flags: Any, mistakes: Mistakes) -> None:
    """Note tasks of a step that trains no language model. flags: of a step; those of step 3 name none."""
    scores = getattr(getattr(flags, "step", None), "kind", "") == "reward"
    mistakes.require(
        not scores or not flags.added.of(RunTaskArguments).harness_tasks,
        "--harness_tasks needs a language model, but this step trains a reward model; remove --harness_tasks",
    )
