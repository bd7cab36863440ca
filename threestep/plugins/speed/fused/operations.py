"""Liger Kernel's fused operations in a model's forward, on CUDA (Hsu et al. 2024, arXiv:2410.10989).

A norm, a gate and a rotation of queries and keys are four to ten kernels each as models are written, and each of those
reads and writes every token; fused they are one. Their numbers are those of the plain operations up to rounding: they
are held against the model's own forward when it is loaded. Parts are known by how their class is written, so that a
family is served that Liger has never heard of.

N rows, T tokens in a row, H hidden size, I intermediate size, A heads, D head size.
"""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from threestep.plugins.speed.lean.code import is_written_as
from threestep.plugins.speed.lean.gated_mlp import computed_again, is_gated
from threestep.plugins.speed.lean.rms_norm import NormForm, norm_form

if TYPE_CHECKING:
    from collections.abc import Callable

    Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]

_ROTATE = "apply_rotary_pos_emb"


class Kernels(NamedTuple):
    """Operations on tensors of one kind of device, with gradients.

    rms_norm: (x, weight, *, epsilon, offset, casting) -> y. offset: of the weight. casting: "llama" rounds the
        normalized input to its precision before it is scaled, "gemma" after.
    silu_mul, gelu_mul: (gate, up) -> silu(gate) * up, or by gelu's approximation. Their backward may write into both.
    rotate: (queries [N, A, T, D], keys, cos [N, T, D], sin) -> both rotated, into which it may write.
    """

    device: str
    rms_norm: Callable[..., torch.Tensor]
    silu_mul: Multiply
    gelu_mul: Multiply
    rotate: Rotate


def liger_kernels() -> Kernels:
    """Return Liger Kernel's. ImportError where it is not installed."""
    from liger_kernel.ops import (
        LigerGELUMulFunction,
        LigerRMSNormFunction,
        LigerRopeFunction,
        LigerSiLUMulFunction,
    )

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, *, epsilon: float, offset: float, casting: str) -> torch.Tensor:
        # Not in place: a residual sum may have handed the same gradient on.
        return LigerRMSNormFunction.apply(x, weight, epsilon, offset, casting, False, None)

    def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        # As one row: the kernel is compiled anew for each number of rows (0.8.5, ops/rope.py).
        rows, tokens = q.shape[0], q.shape[2]
        cos, sin = (part.expand(rows, tokens, -1).reshape(1, rows * tokens, -1) for part in (cos, sin))
        turned = LigerRopeFunction.apply(
            *(part.transpose(1, 2).flatten(0, 1)[None].transpose(1, 2) for part in (q, k)), cos, sin
        )
        return tuple(part.transpose(1, 2).unflatten(1, (rows, tokens))[0].transpose(1, 2) for part in turned)

    return Kernels("cuda", rms_norm, LigerSiLUMulFunction.apply, LigerGELUMulFunction.apply, rotate)


def fuse(model: nn.Module, kernels: Kernels) -> list[nn.Module]:
    """Give the parts of `model` that are written in a usual way these operations, in place; return them."""
    fused = []
    for part in model.modules():
        if "forward" not in vars(part) and (forward := _fused(part, kernels)) is not None:
            part.forward = forward  # type: ignore[assignment]
            fused.append(part)
    return fused


def unfuse(parts: list[nn.Module]) -> None:
    """Take back `fuse`."""
    for part in parts:
        del part.forward


def keep_less_fused(model: nn.Module) -> None:
    """Have fused MLPs keep less, as `lean.forwards.keep_less` has the others."""
    for part in model.modules():
        if isinstance(forward := vars(part).get("forward"), FusedMlp):
            forward.keeps_less = True


def _fused(part: nn.Module, kernels: Kernels) -> Callable[..., Any] | None:
    form = norm_form(part)
    if form is not None:
        return FusedNorm(part, form, kernels)
    multiply = _multiplying(part.act_fn, kernels) if is_gated(part) else None
    return _with_fused_rotation(part, kernels) if multiply is None else FusedMlp(part, multiply, kernels.device)


def _multiplying(act: Any, kernels: Kernels) -> Multiply | None:
    """Return the product with this activation, known by what it computes; None where there is none."""
    probe = torch.linspace(-6.0, 6.0, 97)
    if torch.equal(act(probe), functional.silu(probe)):
        return kernels.silu_mul
    return kernels.gelu_mul if torch.equal(act(probe), functional.gelu(probe, approximate="tanh")) else None


def _suits(x: torch.Tensor, device: str) -> bool:
    """Return whether kernels of a kind of device compute with `x`: they sum in float32, and none starts for no rows."""
    return x.device.type == device and x.dtype != torch.float64 and x.numel() > 0


class FusedNorm:
    """The forward of an RMSNorm."""

    def __init__(self, norm: nn.Module, form: NormForm, kernels: Kernels) -> None:
        self._norm: Any = norm
        self._form, self._kernels = form, kernels

    def __call__(self, x_NTH: torch.Tensor) -> torch.Tensor:
        norm, form = self._norm, self._form
        # Of mixed precision the family returns the wider.
        is_mixed = form.rounds_first and x_NTH.dtype != norm.weight.dtype
        if is_mixed or not _suits(x_NTH, self._kernels.device):
            return type(norm).forward(norm, x_NTH)
        casting = "llama" if form.rounds_first else "gemma"
        epsilon, offset = getattr(norm, form.epsilon), float(form.adds_one)
        return self._kernels.rms_norm(x_NTH, norm.weight, epsilon=epsilon, offset=offset, casting=casting)


class FusedMlp:
    """The forward of a gated MLP. keeps_less: the product of gate and up, which the last layer saves, is computed again
    in the backward; not where the whole block is."""

    def __init__(self, mlp: nn.Module, multiply: Multiply, device: str) -> None:
        self._mlp: Any = mlp
        self._multiply, self._device, self.keeps_less = multiply, device, False

    def __call__(self, x_NTH: torch.Tensor) -> torch.Tensor:
        mlp, multiply = self._mlp, self._multiply
        if not _suits(x_NTH, self._device):
            return type(mlp).forward(mlp, x_NTH)
        gate_NTI, up_NTI = mlp.gate_proj(x_NTH), mlp.up_proj(x_NTH)
        product_NTI = multiply(gate_NTI, up_NTI)
        if not (self.keeps_less and product_NTI.requires_grad):
            return mlp.down_proj(product_NTI)
        # The last layer's backward comes before that of the product, which writes into both.
        gate_NTI, up_NTI = gate_NTI.detach(), up_NTI.detach()
        with computed_again(product_NTI, torch.no_grad()(lambda: multiply(gate_NTI, up_NTI))):
            return mlp.down_proj(product_NTI)


def _usual_rotation(q: Any, k: Any, cos: Any, sin: Any, *, unsqueeze_dim: int = 1) -> Any:
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def rotate_half(x: Any) -> Any:
    """As families have it."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def _with_fused_rotation(part: nn.Module, kernels: Kernels) -> Callable[..., Any] | None:
    """Return the forward of an attention with the usual rotation, with another function under that name."""
    forward: Any = type(part).forward
    known = getattr(forward, "__globals__", {})
    plain: Any = known.get(_ROTATE)
    if _ROTATE not in getattr(getattr(forward, "__code__", None), "co_names", ()):
        return None
    if not is_written_as(plain, _usual_rotation) or plain.__defaults__ != (1,):
        return None
    if not is_written_as(plain.__globals__.get("rotate_half"), rotate_half):
        return None

    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *others: Any, **more: Any
    ) -> Any:
        is_usual = not others and not more and cos.shape[-1] == q.shape[-1] and cos.dtype == q.dtype == k.dtype
        if is_usual and _suits(q, kernels.device):
            return kernels.rotate(q, k, cos, sin)
        return plain(q, k, cos, sin, *others, **more)

    written = forward.__code__, {**known, _ROTATE: rotate}, forward.__name__, forward.__defaults__, forward.__closure__
    twin = FunctionType(*written)
    twin.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(twin, part)
