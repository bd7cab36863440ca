"""The losses of step 3: the policy's (`policy`, `covariance`) and those beside it (`added`). The room serves
`--policy_loss` and `--loss_aggregation`, by the tables of their names. Cheap to import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from training.utils.base.tables import imported

if TYPE_CHECKING:
    import torch

    from training.step3_ppo.losses.aggregation import StepTotals
    from training.step3_ppo.losses.tokens import PolicyLossSettings, PolicyTokens


@dataclass(frozen=True)
class PolicyLoss:
    """An entry of the table; a user's is one too, or its function alone.

    loss: see `losses.tokens`.
    keys: ranks the tokens of a step for losses that treat some of them apart (`losses.covariance`); None for others.
    aggregation, clip_low, clip_high: defaults, those of the loss's authors.
    has_ratio: the loss has the ratio of the new to the old policy, and so needs no other weight for it.
    """

    loss: Callable[[PolicyTokens, PolicyLossSettings], tuple[torch.Tensor, torch.Tensor]]
    keys: Callable[[torch.Tensor, torch.Tensor, float, float], torch.Tensor] | None = None
    aggregation: str = "token-mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    has_ratio: bool = True


_POLICY, _COVARIANCE = f"{__name__}.policy", f"{__name__}.covariance"
POLICY_LOSSES = {
    "ppo": PolicyLoss(imported(f"{_POLICY}:ppo")),
    "gspo": PolicyLoss(imported(f"{_POLICY}:gspo"), None, "seq-mean-token-mean", clip_low=3e-4, clip_high=4e-4),
    "cispo": PolicyLoss(imported(f"{_POLICY}:cispo"), clip_low=1.0, clip_high=4.0),  # weights from 0 to 5
    "geo_mean": PolicyLoss(imported(f"{_POLICY}:geo_mean"), None, "seq-mean-token-mean", clip_low=0.4, clip_high=0.4),
    "sapo": PolicyLoss(imported(f"{_POLICY}:sapo"), None, "seq-mean-token-mean"),
    "gpg": PolicyLoss(imported(f"{_POLICY}:gpg"), has_ratio=False),
    "kl_cov": PolicyLoss(imported(f"{_COVARIANCE}:kl_cov"), imported(f"{_COVARIANCE}:kl_cov_keys")),
    "clip_cov": PolicyLoss(imported(f"{_COVARIANCE}:clip_cov"), imported(f"{_COVARIANCE}:clip_cov_keys")),
}
# fn(counted_M, sequence_M, totals) -> weights_M, see `losses.aggregation`.
AGGREGATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor, StepTotals], torch.Tensor]] = {
    "token-mean": imported(f"{__name__}.aggregation:token_mean"),
    "seq-mean-token-sum": imported(f"{__name__}.aggregation:sequence_sum"),
    "seq-mean-token-mean": imported(f"{__name__}.aggregation:sequence_mean"),
    "seq-mean-token-sum-norm": imported(f"{__name__}.aggregation:sequence_sum_norm"),
}
