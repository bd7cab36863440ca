"""Disks that refuse a finished model, or the last checkpoint: a wait, and another folder."""

from training.utils.plugins.plugin import EVERY_STEP, Plugin

PLUGIN = Plugin(
    "full_disks",
    "a wait for a disk that refuses a finished model, and another folder for it",
    flags={EVERY_STEP: (f"{__name__}.arguments:FullDiskArguments",)},
    tables={"run_courses": {"full_disks": f"{__name__}.rescue:open_course"}},
)
