"""The best settings for a model on so many devices: threestep plan."""

from training.utils.plugins.plugin import Command, Plugin

PLUGIN = Plugin(
    "plan",
    "settings, seconds and cost before a run",
    commands={
        "plan": Command(__name__, "the best settings for a model on so many GPUs, and their cost, before a run"),
    },
)
