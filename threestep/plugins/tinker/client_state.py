"""All that is trained of one client: its weights as one vector, their gradient, and AdamW's moments.

P weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from threestep.plugins.tinker.records import WrongRequest

if TYPE_CHECKING:
    from threestep.plugins.tinker.records import AdamOrder

_CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


@dataclass
class ClientState:
    """gradient_P: the sum since the last optimizer step; None before the first backward behind it. steps: of the
    optimizer."""

    weights_P: torch.Tensor
    first_P: torch.Tensor
    second_P: torch.Tensor
    gradient_P: torch.Tensor | None = None
    steps: int = 0

    @classmethod
    def new(cls, weights_P: torch.Tensor) -> ClientState:
        """The state before any step."""
        return cls(weights_P, torch.zeros_like(weights_P), torch.zeros_like(weights_P))

    def add(self, gradient_P: torch.Tensor) -> None:
        """Add to the gradient."""
        self.gradient_P = gradient_P if self.gradient_P is None else self.gradient_P + gradient_P

    def step(self, order: AdamOrder) -> dict[str, float]:
        """Take a step of AdamW (Loshchilov and Hutter 2019, as torch.optim.AdamW), and drop the gradient. Return its
        norm before clipping. Without a backward since the last step the gradient is 0. WrongRequest for a gradient
        that is not finite, which is dropped; the weights stay."""
        gradient_P, self.gradient_P = self.gradient_P, None
        if gradient_P is None:
            gradient_P = torch.zeros_like(self.weights_P)
        norm = float(torch.linalg.vector_norm(gradient_P))
        if not norm < float("inf"):
            raise WrongRequest(
                f"the gradient's norm is {norm}, so no step was taken and the gradient was dropped; check the "
                "advantages, weights and logprobs in the last forward_backward"
            )
        if order.grad_clip_norm > 0.0:
            gradient_P = gradient_P * min(1.0, order.grad_clip_norm / (norm + _CLIP_EPS))
        self.steps += 1
        self.first_P = self.first_P * order.beta1 + gradient_P * (1.0 - order.beta1)
        self.second_P = self.second_P * order.beta2 + gradient_P.square() * (1.0 - order.beta2)
        first_share, second_share = 1.0 - order.beta1**self.steps, 1.0 - order.beta2**self.steps
        size = order.learning_rate / first_share
        divisor_P = (self.second_P / second_share).sqrt_().add_(order.eps)
        weights_P = self.weights_P * (1.0 - order.learning_rate * order.weight_decay)
        self.weights_P = weights_P.sub_(self.first_P / divisor_P * size)
        return {"grad_norm": norm}
