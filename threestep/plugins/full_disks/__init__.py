"""Disks that are full: the room that a run needs, a wait for what they refuse, another folder."""

from training.utils.plugins.plugin import EVERY_STEP, Plugin

PLUGIN = Plugin(
    "full_disks",
    "the disk space a run needs, a wait for a disk that refuses its model, and another folder for it",
    flags={EVERY_STEP: (f"{__name__}.arguments:FullDiskArguments",)},
    tables={"run_courses": {"full_disks": f"{__name__}.rescue:open_course"}},
)
