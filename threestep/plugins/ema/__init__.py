"""An exponential moving average of the weights of step 3's actor."""

from training.utils.plugins.plugin import Hooks, Plugin, RunFile

PLUGIN = Plugin(
    "ema",
    "a moving average of the actor's weights, saved as a model",
    flags={"step3_ppo": (f"{__name__}.arguments:AverageArguments",)},
    tables={"run_files": {"model_ema/": RunFile()}},
    hooks=Hooks(guests=f"{__name__}.feature:average_of"),
)
