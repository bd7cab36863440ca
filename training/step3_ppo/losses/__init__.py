"""The losses of step 3, by the tables of names for `--policy_loss` and `--loss_aggregation`. Cheap to import."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from training.utils.base.user_files import imported
from training.utils.flags.added import with_added
from training.utils.plugins.objectives import PolicyLoss

if TYPE_CHECKING:
    import torch

    from training.step3_ppo.losses.losses import StepTotals

_HERE = f"{__name__}.losses"
POLICY_LOSSES = with_added("policy_losses", {"ppo": PolicyLoss(imported(f"{_HERE}:ppo"))}, PolicyLoss)
# fn(counted_M, sequence_M, totals) -> weights_M, see `losses.losses`.
AGGREGATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor, StepTotals], torch.Tensor]] = {
    "token-mean": imported(f"{_HERE}:token_mean"),
    "seq-mean-token-sum": imported(f"{_HERE}:sequence_sum"),
    "seq-mean-token-mean": imported(f"{_HERE}:sequence_mean"),
    "seq-mean-token-sum-norm": imported(f"{_HERE}:sequence_sum_norm"),
}
