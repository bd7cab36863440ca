"""Check of the metric that a run is judged by, before a model loads. Cheap to import."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from threestep.plugins.best_model.arguments import BestModelArguments
from training.utils.base.errors import nearest_names
from training.utils.flags.added import figures_of_others
from training.utils.flags.step import step_of
from training.utils.plugins.registry import added

if TYPE_CHECKING:
    from training.utils.base.errors import Mistakes


def check(flags: Any, mistakes: Mistakes) -> None:
    """Note a metric that no evaluation of the step has. flags: of a step."""
    metric = flags.added.of(BestModelArguments).metric_for_best_model
    if metric is None or figures_of_others(flags.settings):
        return
    step = step_of(flags.settings)
    declared = step.figures.evaluates
    more = added("evaluated_figures", declared).items()
    figures = (*declared, *(name for name, steps in more if step.name in steps))
    if may_be_evaluated(metric, figures):
        return
    named = [name.replace("*", "NAME") for name in figures if "*" not in name.removesuffix("/*")]
    mistakes.add(
        f"--metric_for_best_model expects an evaluation metric, one of {', '.join(named)}, got "
        f"'{metric}'{nearest_names(metric.removeprefix('eval_'), named)}"
    )


def may_be_evaluated(given: str, declared: Sequence[str]) -> bool:
    """False for a metric that no evaluation of a step has. declared: as of `StepFigures.evaluates`"""
    name = given.removeprefix("eval/").removeprefix("eval_")
    return not declared or any(fnmatchcase(name, pattern) for pattern in declared)
