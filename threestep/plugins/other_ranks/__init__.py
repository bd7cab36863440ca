"""Runs that resume on another number of ranks or at another ZeRO stage."""

from training.utils.plugins.plugin import Plugin

PLUGIN = Plugin(
    "other_ranks",
    "checkpoints that resume with another number of ranks or another ZeRO stage",
    tables={"conversions": {"universal": f"{__name__}.universal:load_converted"}},
)
