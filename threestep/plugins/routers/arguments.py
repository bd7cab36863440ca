"""The flags of the routers of mixtures of experts, in groups. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from training.utils.flags.flags import flag

NO_REPLAY = "none"


@dataclass
class RouterArguments:
    """The balancing loss of routers."""

    topic: ClassVar[str] = "model"

    router_aux_loss_coef: float | None = flag(
        None,
        "Mixtures of experts: weight of the router balancing loss (Fedus et al. 2021); default: the model's own "
        "weight; 0 turns it off.",
        "factor >= 0",
    )


@dataclass
class ReplayArguments:
    """Replay of a rollout's routers in training."""

    topic: ClassVar[str] = "mismatch"

    replay_routers: str = flag(
        NO_REPLAY,
        "For an actor that is a mixture of experts: record which experts computed each token in the rollout, and "
        "'follow' these choices in training or 'compare' them with training's own.",
        choices=(NO_REPLAY, "compare", "follow"),
    )
