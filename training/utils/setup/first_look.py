"""Checks of a run before libraries load and ranks start: an earlier run in its folder, data that do not fit.

Cheap to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.utils.base.errors import ThreestepError, nearest_names
from training.utils.checkpoints.folder import CheckpointFolder
from training.utils.checkpoints.other_runs import check_earlier_run
from training.utils.data.sources.first_look import look_at_data
from training.utils.plugins.registry import added
from training.utils.run.metrics import may_be_evaluated

if TYPE_CHECKING:
    from training.utils.checkpoints.arguments import CheckpointArguments
    from training.utils.data.sources.arguments import SourceArguments
    from training.utils.flags.step import Step
    from training.utils.run.run_arguments import RunArguments


def look_first(
    step: Step,
    run: RunArguments,
    checkpoints: CheckpointArguments,
    source: SourceArguments,
    *,
    runs: bool = True,
    has_other_figures: bool = False,
) -> None:
    """ThreestepError if the folder holds a finished run, or if the data cannot serve the step. Also for a metric that
    its evaluations do not have.

    runs: False where something else is done in place of a run, which needs neither
    has_other_figures: evaluations have figures that the step does not declare
    """
    if not has_other_figures:
        _check_metric(step, checkpoints.metric_for_best_model)
    if not runs:
        return
    if not checkpoints.overwrite:
        check_earlier_run(CheckpointFolder(run.output_dir), resumes=checkpoints.resume is not None)
    if step.number:  # of the phase whose rows it takes
        look_at_data(int(step.number), source)


def _check_metric(step: Step, metric: str | None) -> None:
    more = added("evaluated_figures", step.figures.evaluates).items()
    figures = (*step.figures.evaluates, *(name for name, steps in more if step.name in steps))
    if metric is None or may_be_evaluated(metric, figures):
        return
    named = [name.replace("*", "NAME") for name in figures if "*" not in name.removesuffix("/*")]
    raise ThreestepError(
        f"--metric_for_best_model expects a figure of evaluations, one of {', '.join(named)}, got '{metric}'"
        f"{nearest_names(metric.removeprefix('eval_'), named)}"
    )
