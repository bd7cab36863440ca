"""Liger Kernel's operations in plain PyTorch, with its habits: a product's backward writes into its inputs, a rotation
into queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from threestep.plugins.speed.fused.operations import Kernels, rotate_half


def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, epsilon: float, offset: float, casting: str) -> torch.Tensor:
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    if casting == "llama":
        return ((weight + offset) * wide.to(x.dtype)).to(x.dtype)
    return (wide * (weight.float() + offset)).to(x.dtype)


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, act: Any) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return act(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            own = gate.detach().clone().requires_grad_()
            acted = ctx.act(own)
        of_gate = torch.autograd.grad(acted, own, gradient * up)[0]
        up.data.copy_(gradient * acted.detach())
        gate.data.copy_(of_gate)
        return gate, up, None


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        return tuple(part.copy_(_turned(part, cos, sin)) for part in (q, k))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return *(_turned(part, cos, -sin) for part in gradients), None, None  # a rotation's transpose is its inverse


def _turned(part: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return part * cos.unsqueeze(1) + rotate_half(part) * sin.unsqueeze(1)


def plain_kernels(device: str = "cpu") -> Kernels:
    silu, gelu = functional.silu, lambda gate: functional.gelu(gate, approximate="tanh")
    return Kernels(
        device,
        rms_norm,
        lambda gate, up: _Multiplied.apply(gate, up, silu),
        lambda gate, up: _Multiplied.apply(gate, up, gelu),
        _Rotated.apply,
    )
