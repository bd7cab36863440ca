"""The flags of the moving average. Cheap to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from training.utils.flags.flags import flag


@dataclass
class AverageArguments:
    """The moving average of the actor's weights."""

    topic: ClassVar[str] = "policy"

    enable_ema: bool = flag(
        False, "Also keep a moving average of the actor's weights, and save it as OUTPUT_DIR/model_ema."
    )
    ema_decay: float = flag(
        0.992, "Decay of the moving average per step (the default is DeepSpeed-Chat's).", "0 < rate < 1"
    )
