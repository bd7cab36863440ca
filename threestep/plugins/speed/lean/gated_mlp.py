"""Gated MLPs that keep two of their four inner activations for the backward, and compute the other two again.

down(act(gate(x)) * up(x)): autograd saves gate, act(gate), up and their product, each [N, T, I]. The second and the
fourth take a pass over the first and the third, which is little beside the three matrix products; the operations and
their numbers stay the same, so that gradients do, to the bit.

N rows, T tokens in a row, I intermediate size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from threestep.plugins.speed.lean.code import is_written_as
from training.utils.models.settings import KeepsLess

if TYPE_CHECKING:
    from collections.abc import Callable


def _usual_forward(self: Any, x: Any) -> Any:
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


def is_gated(part: nn.Module) -> bool:
    """Return whether `part` is a gated MLP of the usual form."""
    return is_written_as(type(part).forward, _usual_forward)


def lean_mlp(part: nn.Module) -> GatedMlp | None:
    """Return the forward with which `part` keeps less; None if it is no gated MLP of the usual form."""
    return GatedMlp(part) if is_gated(part) else None


class GatedMlp(KeepsLess):
    """The forward of `mlp`."""

    def __init__(self, mlp: nn.Module) -> None:
        self._whole: Callable[[torch.Tensor], torch.Tensor] = mlp.forward
        self._mlp: Any = mlp

    def __call__(self, x_NTH: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self._whole(x_NTH)
        mlp = self._mlp
        gate_NTI, up_NTI = mlp.gate_proj(x_NTH), mlp.up_proj(x_NTH)
        inner = _Inner(mlp.act_fn, gate_NTI.detach(), up_NTI.detach())
        product_NTI = _GateTimesUp.apply(gate_NTI, up_NTI, inner)
        with computed_again(product_NTI, inner.product):
            return mlp.down_proj(product_NTI)


def computed_again(product: torch.Tensor, again: Callable[[], torch.Tensor]) -> saved_tensors_hooks:
    """Return a context inside of which `product` is not saved for the backward, which calls `again` for it instead."""
    storage, elements = product.untyped_storage()._cdata, product.numel()

    def pack(saved: torch.Tensor) -> Any:
        is_product = saved.untyped_storage()._cdata == storage and saved.numel() == elements
        return _Again(again, saved.shape) if is_product and saved.is_contiguous() else saved

    return saved_tensors_hooks(pack, _unpacked)


class _Inner:
    """The two that are kept. release: once the backward has passed."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor], gate: torch.Tensor, up: torch.Tensor) -> None:
        self.act = act
        self.kept: tuple[torch.Tensor, torch.Tensor] | None = (gate, up)
        self._acted: tuple[torch.Tensor, torch.Tensor] | None = None

    def acted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gate, detached, and its activation with a graph."""
        assert self.kept is not None, "one backward"
        if self._acted is None:
            with torch.enable_grad():
                gate = self.kept[0].detach().requires_grad_()
                self._acted = gate, self.act(gate)
        return self._acted

    def product(self) -> torch.Tensor:
        _, acted = self.acted()
        assert self.kept is not None
        return acted.detach() * self.kept[1]

    def release(self) -> None:
        self.kept = self._acted = None


class _Again(NamedTuple):
    """In the place of the saved product."""

    product: Callable[[], torch.Tensor]
    shape: torch.Size


def _unpacked(packed: Any) -> torch.Tensor:
    return packed.product().view(packed.shape) if isinstance(packed, _Again) else packed


class _GateTimesUp(torch.autograd.Function):
    """act(gate) * up, which saves gate and up alone."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, inner: _Inner) -> torch.Tensor:
        ctx.save_for_backward(gate, up)  # counted by dry runs; `inner` has the same
        ctx.inner = inner
        return inner.act(gate) * up

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        inner = ctx.inner
        gate, acted = inner.acted()
        _, up = ctx.saved_tensors
        wants_gate, wants_up, _ = ctx.needs_input_grad
        of_up = gradient * acted.detach() if wants_up else None
        of_gate = torch.autograd.grad(acted, gate, gradient * up)[0] if wants_gate else None
        inner.release()
        return of_gate, of_up, None
