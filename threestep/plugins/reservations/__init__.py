"""Stops a run, with a checkpoint, before its time is up."""

from training.utils.plugins.plugin import EVERY_STEP, Hooks, Plugin

PLUGIN = Plugin(
    "reservations",
    "stops a run with a checkpoint before a time limit or the end of a machine's reservation",
    flags={EVERY_STEP: (f"{__name__}.arguments:ReservationArguments",)},
    tables={"run_courses": {"reservations": f"{__name__}.ends:open_course"}},
    hooks=Hooks(at_start=f"{__name__}.ends:check_end"),
)
