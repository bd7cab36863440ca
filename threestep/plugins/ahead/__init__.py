"""Rollouts that are drawn ahead: responses of later steps, while one trains, by weights that are a little older."""

from training.utils.plugins.plugin import Hooks, Plugin

PLUGIN = Plugin(
    "ahead",
    "responses of later steps, drawn while the current step trains",
    needs=("replay",),
    flags={"step3_ppo": (f"{__name__}.arguments:AheadArguments",)},
    tables={
        "advice": {"rollouts_ahead": {"old_weights": "--rollouts_ahead"}},
        "curves": {
            "waiting": (
                "step3_ppo",
                "Waiting",
                "seconds per step, with --rollouts_ahead",
                {"training for its rollouts": "waiting/training", "drawing for weights": "waiting/drawing"},
            ),
        },
    },
    hooks=Hooks(rollout_scheduler=f"{__name__}.scheduler:rollout_scheduler"),
)
