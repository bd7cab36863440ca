"""RMSNorms that keep their input as it was given, and one number a token, for the backward.

weight * (x / rms(x)): autograd saves x in float32, a copy where the model computes in 16 bits, and x / rms(x), in
float32 or as it was rounded. Both are one pass over the input, which is kept with 1 / rms(x). The backward below does
torch's own operations in their order (derivatives.yaml of torch: mul, rsqrt, mean, pow), so that gradients keep their
bits, without the tensors that torch writes in between: it is the faster one too.

N rows, T tokens in a row, H hidden size; of norms of queries and keys, [N, T, A, D].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from threestep.plugins.speed.lean.code import is_written_as
from training.utils.models.settings import KeepsLess


def _of_llama(self: Any, hidden_states: Any) -> Any:
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)


def _of_olmo2(self: Any, hidden_states: Any) -> Any:
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return (self.weight * hidden_states).to(input_dtype)


def _of_gemma(self: Any, x: Any) -> Any:
    output = self._norm(x.float())
    output = output * (1.0 + self.weight.float())
    return output.type_as(x)


def _norm_of_gemma(self: Any, x: Any) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class NormForm(NamedTuple):
    """methods: as the class has them. epsilon: the attribute. rounds_first: the normalized input is rounded to the
    input's precision before it is scaled, not after. adds_one: to the weight."""

    methods: dict[str, Callable[..., Any]]
    epsilon: str
    rounds_first: bool = False
    adds_one: bool = False


_FORMS = (
    NormForm({"forward": _of_llama}, "variance_epsilon", rounds_first=True),
    NormForm({"forward": _of_olmo2}, "variance_epsilon"),
    NormForm({"forward": _of_gemma, "_norm": _norm_of_gemma}, "eps", adds_one=True),
)


def norm_form(part: nn.Module) -> NormForm | None:
    """Return the form in which `part` is written; None if it is no RMSNorm of a usual form."""
    for form in _FORMS:
        if all(is_written_as(getattr(type(part), name, None), usual) for name, usual in form.methods.items()):
            return form
    return None


def lean_norm(part: nn.Module) -> RmsNorm | None:
    """Return the forward with which `part` keeps less; None if it is no RMSNorm of a usual form."""
    form = norm_form(part)
    return None if form is None else RmsNorm(part, form)


class RmsNorm(KeepsLess):
    """The forward of `norm`."""

    def __init__(self, norm: nn.Module, form: NormForm) -> None:
        self._norm: Any = norm
        self._form = form

    def __call__(self, x_NTH: torch.Tensor) -> torch.Tensor:
        norm, form = self._norm, self._form
        learns = x_NTH.requires_grad or norm.weight.requires_grad
        if not (learns and torch.is_grad_enabled()):
            return type(norm).forward(norm, x_NTH)
        factor_H = 1.0 + norm.weight.float() if form.adds_one else norm.weight
        dtype = x_NTH.dtype if form.rounds_first else torch.float32
        given = _Given(x_NTH.detach(), getattr(norm, form.epsilon), dtype)
        wide_NTH = x_NTH.to(torch.float32)
        scaled_NTH = _Scaled.apply(wide_NTH, wide_NTH, factor_H, given)
        return scaled_NTH if form.rounds_first else scaled_NTH.to(x_NTH.dtype)


class _Given(NamedTuple):
    """The input as it was given; what is added to its mean square; the precision in which it is scaled."""

    x: torch.Tensor
    epsilon: float
    dtype: torch.dtype


class _Scaled(torch.autograd.Function):
    """factor * (x / rms(x)). It takes x twice, for the product and for the square: their gradients reach x one after
    the other, behind those of its other readers, and sums of three keep their order."""

    @staticmethod
    def forward(ctx: Any, wide_NTH: torch.Tensor, _: torch.Tensor, *scale: Any) -> torch.Tensor:
        factor_H, given = scale
        inverse_NT1 = torch.rsqrt(wide_NTH.pow(2).mean(-1, keepdim=True) + given.epsilon)
        ctx.save_for_backward(given.x, inverse_NT1)
        # Not saved: ZeRO-3 takes the weight away and gathers it for the backward of its module.
        ctx.factor, ctx.dtype = factor_H, given.dtype
        normalized_NTH = (wide_NTH * inverse_NT1).to(given.dtype)
        return normalized_NTH.mul_(factor_H) if factor_H.dtype == given.dtype else factor_H * normalized_NTH

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient_NTH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_NTH, inverse_NT1 = ctx.saved_tensors
        wide_NTH, factor_H = x_NTH.to(inverse_NT1.dtype), ctx.factor.detach()
        wants_x, _, wants_factor, _ = ctx.needs_input_grad
        of_product = of_square = of_factor = None
        if wants_factor:
            normalized_NTH = (wide_NTH * inverse_NT1).to(ctx.dtype)
            of_factor = (gradient_NTH * normalized_NTH).sum_to_size(factor_H.shape).to(factor_H.dtype)
        if wants_x:
            scaled_NTH = (gradient_NTH * factor_H).to(ctx.dtype).to(inverse_NT1.dtype)
            of_inverse_NT1 = (scaled_NTH * wide_NTH).sum_to_size(inverse_NT1.shape)
            of_mean_NT1 = -0.5 * of_inverse_NT1 * inverse_NT1.pow(3) / wide_NTH.shape[-1]
            of_product, of_square = scaled_NTH.mul_(inverse_NT1), (2 * wide_NTH).mul_(of_mean_NT1)
        return of_product, of_square, of_factor, None
