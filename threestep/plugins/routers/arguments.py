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
        "Mixtures of experts: weight of the routers' balancing loss (Fedus et al. 2021); default: the model's own; "
        "0 adds none.",
        "factor >= 0",
    )


@dataclass
class ReplayArguments:
    """Replay of a rollout's routers in training."""

    topic: ClassVar[str] = "mismatch"

    replay_routers: str = flag(
        NO_REPLAY,
        "For an actor that is a mixture of experts: record the experts that computed each token of the rollout, and "
        "'follow' them in training, or 'compare' training's own with them.",
        choices=(NO_REPLAY, "compare", "follow"),
    )
