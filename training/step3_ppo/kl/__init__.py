"""The KL divergence to the reference: estimators and control of its coefficient. The room serves `--kl_estimator` by
the table of its names. Cheap to import."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.utils.base.user_files import imported

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class KlEstimator:
    """estimate: fn(logprobs, ref_logprobs) of the drawn tokens, or fn(logits, ref_logits) where it is of_logits."""

    estimate: Callable[..., torch.Tensor]
    of_logits: bool = False


KL_ESTIMATORS = {
    "k1": KlEstimator(imported(f"{__name__}.estimators:k1")),
    "k2": KlEstimator(imported(f"{__name__}.estimators:k2")),
    "k3": KlEstimator(imported(f"{__name__}.estimators:k3")),
    "abs": KlEstimator(imported(f"{__name__}.estimators:absolute")),
    "k1+": KlEstimator(imported(f"{__name__}.estimators:k1_pulling")),
    "k3+": KlEstimator(imported(f"{__name__}.estimators:k3_pulling")),
    "abs+": KlEstimator(imported(f"{__name__}.estimators:absolute_pulling")),
    "full": KlEstimator(imported(f"{__name__}.estimators:full_kl"), of_logits=True),
}
DEFAULT_KL_ESTIMATORS = {"reward": "k1", "loss": "k3"}  # in the loss, k1's gradient is 0 on average


_LARGEST_ERROR = 0.2  # Ziegler et al. 2019, section 2.2: the relative error is cut to +- this


@dataclass
class KlControl:
    """Constant without a target; with one, moves kl_coef to hold the KL of a response near it.

    kl_coef <- kl_coef (1 + clip(KL / target - 1, +- 0.2) n / horizon) after n responses whose mean KL, summed over
    their tokens, is KL nats (Ziegler et al. 2019, section 2.2; n / horizon is their K_beta as lm-human-preferences has
    it).
    """

    kl_coef: float
    target: float | None = None
    horizon: float = math.inf

    def slow_warning(self, sequences: int) -> str | None:
        """Return a sentence if kl_coef cannot double over so many responses; None if it can, or is fixed."""
        most = math.exp(_LARGEST_ERROR * sequences / self.horizon)
        if self.target is None or most >= 2.0:
            return None
        return (
            f"warning: --kl_control adaptive can raise --kl_coef by at most {most - 1.0:.1%} over the {sequences:,} "
            f"responses of this run: --kl_horizon {self.horizon:g} is too long, so the KL may miss its target; try a "
            "tenth of the run's responses"
        )

    def update(self, kl: float, sequences: int) -> None:
        if self.target is not None:
            error = min(max(kl / self.target - 1.0, -_LARGEST_ERROR), _LARGEST_ERROR)
            self.kl_coef *= 1.0 + error * sequences / self.horizon
