"""Needs of a run, before it: --dry_run of every step, choices by memory, and the best settings: threestep plan."""

from training.utils.plugins.plugin import EVERY_STEP, Command, InPlaceOfRun, Plugin

PLUGIN = Plugin(
    "plan",
    "settings, memory, time and cost, worked out before a run",
    commands={
        "plan": Command(__name__, "the best settings for a model on given GPUs, with time and cost, before a run"),
    },
    flags={EVERY_STEP: (f"{__name__}.arguments:DryRunArguments",)},
    tables={
        "in_place_of_run": {
            "dry_run": InPlaceOfRun(
                f"{__name__}.dry_run.steps:dry_run",
                "plans for",
                "With --dry_run: number of ranks to plan for; default: the launcher's, or one.",
            ),
        },
        "advice": {
            "dry_run": {
                "batch": ", in forwards as large as free memory allows (by --dry_run's estimate)",
                "autotuning": " and see --dry_run",
            },
        },
        "auto_choices": {
            "per_device_train_batch_size": f"{__name__}.dry_run.steps:chosen_forward",
            "reuse_forwards": f"{__name__}.dry_run.steps:chosen_reuse",
        },
    },
)
