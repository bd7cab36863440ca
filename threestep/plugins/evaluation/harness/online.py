"""Tasks of lm-evaluation-harness beside the evaluations of a run: the first rank asks the model in training, the others
wait. No random state of training is moved."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from threestep.plugins.evaluation.harness.running import AskedModel, AskedTasks, HarnessResult, run_harness_on
from training.utils.base.console import log
from training.utils.base.seeds import random_state_kept
from training.utils.contracts.run import EvaluationObserver
from training.utils.engine.ranks.collectives import on_main
from training.utils.loading.configurations import positions_of

if TYPE_CHECKING:
    from training.utils.contracts.run import EvaluatedRun
    from training.utils.engine.whole_model import WholeModel
    from training.utils.run.run_folder import RunFolder

HARNESS = "harness.json"  # in a run's folder: figures of the tasks, by task


def open_tasks(run: EvaluatedRun) -> OnlineTasks | None:
    """Return the tasks of --harness_tasks, which ask by the chat template where the run's rows have it."""
    names = run.settings["harness_tasks"]
    if not names:
        return None
    asked = AskedModel(run.tokenizer, run.template, positions_of(run.model.model.config), run.rows_per_batch)
    tasks = AskedTasks("--harness_tasks", names, rows=run.settings["harness_rows"])
    return OnlineTasks(run.model, asked, tasks, run.folder)


@dataclass(frozen=True)
class OnlineTasks(EvaluationObserver):
    """Tasks of local files. whole: the model in training; under ZeRO-3 each rank gathers a copy of it.
    folder: of the run, whose harness.json has the model's figures for the report."""

    whole: WholeModel
    model: AskedModel
    tasks: AskedTasks
    folder: RunFolder

    def figures(self, step: int) -> dict[str, float]:
        found, is_main = self._answered(), self.whole.engine.ranks.is_main
        figures = {
            f"eval/{task}_{metric.replace(',', '_')}": value
            for task, of_task in found.tasks.items()
            for metric, (value, _) in of_task.metrics.items()
        }
        said = ", ".join(f"{name.removeprefix('eval/')} {value:.4f}" for name, value in figures.items())
        log(f"tasks after step {step:,}: {said}", is_main)
        return figures

    def restored(self) -> None:
        self._answered()

    def _answered(self) -> HarnessResult:
        """The model's result, which the report then has."""
        is_main = self.whole.engine.ranks.is_main
        with self.whole.lent() as model, random_state_kept():
            asked = self.model._replace(tokenizer=copy.deepcopy(self.model.tokenizer))  # lm_eval pads by its own rules

            def ask() -> HarnessResult:
                return run_harness_on(model, asked, self.tasks)._replace(samples={})

            found = on_main(ask, is_main, patient=True)
        templated = self.model.template is not None
        told = {task: of_task.told(templated, found.version) for task, of_task in found.tasks.items()}
        self.folder.write_figures(HARNESS, told)
        return found
