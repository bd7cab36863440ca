"""An exponential moving average of the weights that an engine trains.

Each rank holds a share of it in float32: half precision would round away a step of 1 - decay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from training.utils.engine.zero3 import overwrite, release_gathered
from training.utils.models.weights import count_elements, whole_shape

if TYPE_CHECKING:
    from training.utils.engine.training_engine import TrainingEngine


class WeightAverage:
    """average = decay * average + (1 - decay) * weight, starting from the present weights.

    Only of weights that `engine` trains (with LoRA: of each adapter matrix), as the model computes with them: with
    bf16, not the optimizer's float32 masters. See `OtherWeights`.
    """

    name, folder = "average", "model_ema"

    def __init__(self, engine: TrainingEngine, decay: float) -> None:
        self._ranks = engine.ranks
        self._engine = engine.engine
        self._is_sharded = engine.settings.zero_stage == 3
        self._decay = decay
        self._weights = [weight for weight in engine.module.parameters() if weight.requires_grad]
        self.shares = [self._share(weight).float().clone() for weight in self._weights]

    @torch.no_grad()
    def update(self) -> None:
        """Add the present weights, after an optimizer step. Not a collective."""
        for share, weight in zip(self.shares, self._weights, strict=True):
            share.lerp_(self._share(weight).float(), 1.0 - self._decay)

    @torch.no_grad()
    def put_in_place(self) -> None:
        """Overwrite the model's weights with the averages, at the end of training. A collective."""
        release_gathered(self._engine)
        for share, weight in zip(self.shares, self._weights, strict=True):
            overwrite(weight, self._whole(share, weight), self._is_sharded)

    def load_state(self, shares: list[torch.Tensor]) -> None:
        """Restore `shares` as they were on this rank, with the same number of ranks."""
        for share, saved in zip(self.shares, shares, strict=True):
            share.copy_(saved)

    def load_whole(self, parts: list[list[torch.Tensor]]) -> None:
        """Restore the `shares` of all ranks, in their order, from any number of ranks and ZeRO stage."""
        rank = self._ranks.rank
        for index, (share, weight) in enumerate(zip(self.shares, self._weights, strict=True)):
            elements, size = count_elements([weight]), self._share_size(weight)
            whole = torch.cat([part[index].reshape(-1) for part in parts])[:elements]
            mine = whole[rank * size : rank * size + share.numel()]
            share.zero_()
            share.view(-1)[: mine.numel()].copy_(mine)

    def _share(self, weight: Any) -> torch.Tensor:
        """This rank's share of the flat weight: ZeRO-3's shard (padded at the end), else a slice of that size."""
        if self._is_sharded:
            return weight.ds_tensor.detach()
        rank, size = self._ranks.rank, self._share_size(weight)
        return weight.detach().reshape(-1)[rank * size : (rank + 1) * size]

    def _share_size(self, weight: Any) -> int:
        return -(-count_elements([weight]) // self._ranks.world_size)

    def _whole(self, share: torch.Tensor, weight: Any) -> torch.Tensor:
        padded = torch.zeros(max(share.numel(), self._share_size(weight)), device=self._ranks.device)
        padded[: share.numel()] = share.to(self._ranks.device)
        parts = [torch.empty_like(padded) for _ in range(self._ranks.world_size)]
        dist.all_gather(parts, padded)
        return torch.cat(parts)[: count_elements([weight])].view(whole_shape(weight))
