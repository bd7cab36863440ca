"""Environments outside of training: listed, played in the terminal, checked: `threestep env`."""

from training.utils.plugins.plugin import Command, Plugin

PLUGIN = Plugin(
    "environments",
    "environments outside of training",
    needs=("evaluation", "report"),
    commands={
        "env": Command(__name__, "environments: a list, one conversation in the terminal, a check before a run"),
    },
)
