"""The audit of a training step: what a record says was computed, recomputed from the parts before it.

Its README.md describes records and what is judged. `recorders` writes records of other trainers.
"""

from training.utils.plugins.plugin import Command, Plugin

PLUGIN = Plugin(
    "audit",
    "every number of a training step, recomputed",
    needs=("report",),
    commands={
        "audit": Command(__name__, "which number of a training step is wrong, and why; where two runs part"),
    },
)
