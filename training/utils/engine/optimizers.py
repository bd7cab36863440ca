"""The optimizer of a model in training, which --optimizer selects. A step that is not finite is left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import named_object
from training.utils.engine.config.arguments import OPTIMIZERS
from training.utils.models.weights import adapters_of, whole_shape

if TYPE_CHECKING:
    from torch import nn

    from training.utils.engine.config.arguments import EngineSettings


def make_optimizer(module: nn.Module, settings: EngineSettings) -> torch.optim.Optimizer:
    """Return the optimizer of the weights of `module` that train, without decay on vectors (biases, norms), as GPT-3
    and its successors train."""
    adapters = adapters_of(module)
    decay, adapter_rate = settings.weight_decay, adapters.learning_rate
    decayed: dict[str, Any] = {"params": [], "weight_decay": decay}
    plain: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    adapted: dict[str, Any] = {"params": [], "weight_decay": decay, "lr": adapter_rate}  # if they have a rate
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            group = decayed if len(whole_shape(parameter)) >= 2 else plain
            group = adapted if adapter_rate is not None and adapters.holds(name) else group
            group["params"].append(parameter)
    place = OPTIMIZERS[settings.optimizer].make
    made = named_object(place)([group for group in (decayed, plain, adapted) if group["params"]], settings)
    if not isinstance(made, torch.optim.Optimizer):
        raise ThreestepError(
            f"--optimizer {settings.optimizer}: {place} must return a torch.optim.Optimizer, but returned a "
            f"{type(made).__name__}"
        )
    return checked(made) if settings.zero_stage == 0 and settings.dtype == "fp32" else made


def adamw(groups: list[dict[str, Any]], settings: EngineSettings) -> torch.optim.Optimizer:
    """Return torch's fused AdamW, which is vectorised on the CPU, one kernel on the GPU, and compiles nothing."""
    betas = (settings.adam_beta1, settings.adam_beta2)
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=betas, eps=settings.adam_epsilon, fused=True)


class FiniteSteps:
    """An optimizer that skips a step whose gradient is not finite, and keeps the norm of the others. For
    float32 at ZeRO stage 0, where DeepSpeed uses the optimizer unwrapped. In all other cases its wrappers skip such a
    step and set `overflow`, which its engine reads here too: the schedule does not move, and the step counts as skipped
    (deepspeed 0.19, engine.py: _take_model_step).

    The gradients are already reduced over all ranks, so every rank makes the same decision.
    """

    param_groups: list[dict[str, Any]]
    overflow = False
    clipped_from: torch.Tensor | None = None  # the norm before clipping, where there is clipping
    _global_grad_norm: float | None = None  # where DeepSpeed's engine looks for it

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        gradients = [
            weight.grad for group in self.param_groups for weight in group["params"] if weight.grad is not None
        ]
        if gradients:
            total = torch.nn.utils.get_total_norm(gradients)
            before = total if self.clipped_from is None else self.clipped_from
            # One read of both: each would wait for the device.
            now, norm = torch.stack([total.float(), before.float().reshape(())]).tolist()
            self.overflow, self.clipped_from = not math.isfinite(now), None
            self._global_grad_norm = math.inf if self.overflow else norm
        return None if self.overflow else super().step(closure)  # type: ignore[misc]


def checked(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Give an optimizer, in place, a step of `FiniteSteps`."""
    kind = type(optimizer)
    optimizer.__class__ = type(f"Checked{kind.__name__}", (FiniteSteps, kind), {})
    return optimizer
