"""The KL divergence to the reference: estimators and control of its coefficient. The room serves `--kl_estimator` by
the table of its names. Cheap to import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.utils.base.tables import imported

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
