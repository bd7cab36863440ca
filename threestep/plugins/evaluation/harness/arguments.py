"""The flags of `evaluate harness`. Cheap to import for `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

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
