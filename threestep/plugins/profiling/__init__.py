"""Traces of single steps by torch's profiler."""

from training.utils.plugins.plugin import EVERY_STEP, Hooks, Plugin, RunFile

PLUGIN = Plugin(
    "profiling",
    "profiles of single steps from torch's profiler",
    flags={EVERY_STEP: (f"{__name__}.arguments:ProfilingArguments",)},
    tables={"run_files": {"profile/": RunFile()}},
    hooks=Hooks(step_observer=f"{__name__}.traces:traces_of"),
)
