"""Rollouts in a folder: those that a run wrote are read in place of generation."""

from threestep.plugins.replay.words import OF_ANOTHER_RUN
from training.utils.plugins.plugin import Hooks, Plugin

PLUGIN = Plugin(
    "replay",
    "rollouts written to a folder, and read back instead of generating",
    flags={"step3_ppo": (f"{__name__}.arguments:RecordedArguments",)},
    tables={
        "rollout_sources": {
            "rollout_dump": f"{__name__}.source:Dumped",
            "rollout_replay": f"{__name__}.source:Replayed",
        },
        "advice": {"rollout_replay": {"page": OF_ANOTHER_RUN}},
    },
    hooks=Hooks(check=f"{__name__}.checks:check"),
)
