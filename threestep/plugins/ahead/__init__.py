"""Rollouts that are drawn ahead: responses of later steps, while one trains, by weights that are a little older."""

from training.utils.plugins.plugin import Hooks, Plugin

PLUGIN = Plugin(
    "ahead",
    "responses of later steps drawn while one trains",
    flags={"step3_ppo": (f"{__name__}.arguments:AheadArguments",)},
    hooks=Hooks(rollout_scheduler=f"{__name__}.scheduler:rollout_scheduler"),
)
