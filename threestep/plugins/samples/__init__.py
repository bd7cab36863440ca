"""Samples of steps 1 and 2: held-out rows with the model's loss, response or scores at each evaluation."""

from training.utils.plugins.plugin import Hooks, Plugin

PLUGIN = Plugin(
    "samples",
    "held-out rows with the model's loss, response or scores, written at each evaluation in steps 1 and 2",
    hooks=Hooks(evaluation_observer=f"{__name__}.observer:open_samples"),
)
