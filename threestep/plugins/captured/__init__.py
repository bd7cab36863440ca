"""Rollouts on CUDA in captured graphs: the host starts a whole decode step by one call."""

from training.utils.plugins.plugin import Plugin

PLUGIN = Plugin(
    "captured",
    "rollouts on CUDA in captured graphs",
    tables={"captured_steps": {"fixed_places": f"{__name__}.steps:FixedSteps"}},
)
