"""AdamW that leaves a step out whose gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class CheckedAdamW(torch.optim.AdamW):
    """For float32 at ZeRO stage 0, where DeepSpeed steps with the optimizer as it is. Its own wrappers, in every other
    case, leave such a step out themselves and say so by `overflow`, which its engine reads of this one too: the
    schedule does not move, and the step counts as skipped (deepspeed 0.19, engine.py: _take_model_step).

    The gradients are those of all ranks already, so that every rank decides alike.
    """

    overflow = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        gradients = [
            weight.grad for group in self.param_groups for weight in group["params"] if weight.grad is not None
        ]
        self.overflow = bool(gradients) and not bool(torch.nn.utils.get_total_norm(gradients).isfinite())
        return None if self.overflow else super().step(closure)
