"""An exponential moving average of the weights that an engine trains.

Kept in float32, each rank a share of it: in half precision a step of 1 - decay would be lost in rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from training.utils.engine.training_engine import TrainingEngine


class WeightAverage:
    """average = decay * average + (1 - decay) * weight, from the weights as they are when this is made.

    Of those weights alone that `engine` trains (LoRA: of the adapters, each by itself), as the model computes with
    them: in bf16, not the optimizer's float32 masters.
    """

    def __init__(self, engine: TrainingEngine, decay: float) -> None:
        self._engine = engine
        self._decay = decay
        self._weights = [weight for weight in engine.module.parameters() if weight.requires_grad]
        self._shares = [self._share(weight).float().clone() for weight in self._weights]

    @torch.no_grad()
    def update(self) -> None:
        """Count the present weights in, after an optimizer step. No collective."""
        for share, weight in zip(self._shares, self._weights, strict=True):
            share.lerp_(self._share(weight).float(), 1.0 - self._decay)

    @torch.no_grad()
    def put_in_place(self) -> None:
        """Overwrite the model's weights with the averages, to be read out; training is over then. A collective."""
        for share, weight in zip(self._shares, self._weights, strict=True):
            whole = self._whole(share, weight)
            if self._is_sharded():
                import deepspeed

                with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
                    weight.data.copy_(whole)
            else:
                weight.data.copy_(whole)

    def state(self) -> list[torch.Tensor]:
        """This rank's shares, float32, for a checkpoint."""
        return self._shares

    def load_state(self, shares: list[torch.Tensor]) -> None:
        """Take up what `state` gave on the same rank of as many ranks."""
        for share, saved in zip(self._shares, shares, strict=True):
            share.copy_(saved)

    def load_whole(self, parts: list[list[torch.Tensor]]) -> None:
        """Take up what `state` gave on every rank, in their order: any number of ranks, on any ZeRO stage."""
        ranks = self._engine.ranks
        for index, (share, weight) in enumerate(zip(self._shares, self._weights, strict=True)):
            elements = getattr(weight, "ds_numel", weight.numel())
            whole = torch.cat([part[index].reshape(-1) for part in parts])[:elements]
            size = -(-elements // ranks.world_size)
            mine = whole[ranks.rank * size : ranks.rank * size + share.numel()]
            share.zero_()
            share.view(-1)[: mine.numel()].copy_(mine)

    def _is_sharded(self) -> bool:
        return self._engine.settings.zero_stage == 3

    def _share(self, weight: Any) -> torch.Tensor:
        """This rank's part of the flat weight: ZeRO-3's own shard (padded at the end), else as large a piece."""
        if self._is_sharded():
            return weight.ds_tensor.detach()
        ranks = self._engine.ranks
        size = -(-weight.numel() // ranks.world_size)
        return weight.detach().reshape(-1)[ranks.rank * size : (ranks.rank + 1) * size]

    def _whole(self, share: torch.Tensor, weight: Any) -> torch.Tensor:
        ranks = self._engine.ranks
        shape, elements = getattr(weight, "ds_shape", weight.shape), getattr(weight, "ds_numel", weight.numel())
        size = max(share.numel(), -(-elements // ranks.world_size))
        padded = torch.zeros(size, device=ranks.device)
        padded[: share.numel()] = share.to(ranks.device)
        parts = [torch.empty_like(padded) for _ in range(ranks.world_size)]
        if ranks.world_size > 1:
            dist.all_gather(parts, padded)
        else:
            parts = [padded]
        return torch.cat(parts)[:elements].view(shape)
