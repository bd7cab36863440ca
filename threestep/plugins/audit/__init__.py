"""The audit of a training step: what a record says was computed, recomputed from the parts before it.

Its README.md describes records and what is judged. `step_recorder` writes records and digests of a run's steps, and
`recorders` records of other trainers.
"""

from training.utils.plugins.plugin import EVERY_STEP, Command, Hooks, Plugin, RunFile

PLUGIN = Plugin(
    "audit",
    "every number of a training step, recorded and recomputed",
    needs=("mismatch", "report"),
    commands={
        "audit": Command(__name__, "find which number of a training step is wrong, and why, or where two runs differ"),
    },
    flags={EVERY_STEP: (f"{__name__}.flags:RecordingArguments",)},
    tables={
        "logs": {"digests.jsonl": "sums and hashes of every step"},
        "run_files": {"records/": RunFile(is_result=True)},
    },
    hooks=Hooks(
        check=f"{__name__}.flags:check",
        step_needs=f"{__name__}.flags:step_needs",
        step_observer=f"{__name__}.step_recorder:open_recorder",
    ),
)
