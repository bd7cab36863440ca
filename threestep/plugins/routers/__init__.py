"""Routers of a mixture of experts: their balancing loss, exact for the whole optimizer step; replay of a rollout's."""

from training.utils.plugins.plugin import EVERY_STEP, Hooks, Plugin

_LOSS = "the router balancing loss"

PLUGIN = Plugin(
    "routers",
    "mixture-of-experts routers: their balancing loss, and training with the rollout's experts",
    flags={
        EVERY_STEP: (f"{__name__}.arguments:RouterArguments",),
        "step3_ppo": (f"{__name__}.arguments:ReplayArguments",),
    },
    tables={"model_losses": dict.fromkeys(("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight"), _LOSS)},
    hooks=Hooks(
        check=f"{__name__}.checks:check_routers",
        step_needs=f"{__name__}.checks:step_needs",
        guests=f"{__name__}.feature:routers_of",
    ),
)
