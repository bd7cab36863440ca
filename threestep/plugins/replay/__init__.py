"""Rollouts in a folder: those that a run wrote are read in place of generation."""

from training.utils.plugins.plugin import Hooks, Plugin

OF_ANOTHER_RUN = (
    "its responses are those of the run that filled {} (--rollout_replay): scores, rewards and lengths of its rollouts "
    "say nothing of its own weights, and it has no evaluations"
)
PLUGIN = Plugin(
    "replay",
    "rollouts written to a folder, and read in place of generation",
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
