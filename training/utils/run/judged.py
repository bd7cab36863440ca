"""The figure of evaluations that a run is judged by, and which of its values is better."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

# What a run is judged by unless --metric_for_best_model names another, the first that it has.
JUDGED = ("eval/reward", "eval/loss")
_LESS_IS_BETTER = ("loss", "perplexity")


def greater_wins(metric: str, given: bool | None = None) -> bool:
    """True if a greater value of `metric` is better: as the flag says, otherwise unless it is a loss."""
    return not metric.endswith(_LESS_IS_BETTER) if given is None else given


def judged_metric(names: Collection[str], given: str | None) -> str | None:
    """The metric that a run is judged by, of an evaluation's `names`: the one that the flag gives, which may be written
    as transformers does (eval_loss); by default the first of `JUDGED`. None if it is not there."""
    if given is None:
        return next((name for name in JUDGED if name in names), None)
    for name in (given, f"eval/{given}", f"eval/{given.removeprefix('eval_')}"):
        # Until November 2026 the best of k was named pass@k where all values were 0 or 1.
        for known in (name, name.replace("_pass@", "_best@")):
            if known in names:
                return known
    return None


def may_be_evaluated(given: str, declared: Sequence[str]) -> bool:
    """False for a metric that no evaluation of a step has. declared: as of `StepFigures.evaluates`"""
    name = given.removeprefix("eval/").removeprefix("eval_")
    return not declared or any(fnmatchcase(name, pattern) for pattern in declared)
