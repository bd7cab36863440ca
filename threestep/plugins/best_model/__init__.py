"""The best model instead of the last, and the end of training by evaluations that get no better."""

from training.utils.plugins.plugin import EVERY_STEP, Hooks, Plugin

PLUGIN = Plugin(
    "best_model",
    "the best model by its evaluations in place of the last, and early stopping",
    flags={EVERY_STEP: (f"{__name__}.arguments:BestModelArguments",)},
    hooks=Hooks(check=f"{__name__}.checks:check"),
    tables={"run_courses": {"best_model": f"{__name__}.best:open_course"}},
)
