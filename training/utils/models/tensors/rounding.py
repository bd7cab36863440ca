"""The effect of rounding alone on a model's numbers, measured by rounding every module's output once more.

Monte Carlo arithmetic (Parker 1997, "Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic"): each
floating-point output of a module without children is multiplied by 1 + eps * u, u uniform in (-1, 1), and rounded. The
numbers move as another order of the same sums could move them: more in half precision, in deep models, and where a
router picks experts by a narrow margin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_AT_ONCE = 2**20  # numbers, so that an MLP's of a long row are not in memory several times


@contextlib.contextmanager
def rounded_once_more(model: nn.Module, seed: int) -> Iterator[None]:
    """Inside, forwards of `model` are disturbed by about one rounding error a module. torch's random state is left
    alone."""
    generators: dict[torch.device, torch.Generator] = {}

    def disturbed(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        generator = generators.setdefault(tensor.device, torch.Generator(tensor.device).manual_seed(seed))
        moved = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for part, into in zip(tensor.flatten().split(_AT_ONCE), moved.view(-1).split(_AT_ONCE), strict=True):
            wide = part.to(torch.promote_types(part.dtype, torch.float32))
            uniform = torch.rand(wide.shape, generator=generator, device=wide.device, dtype=wide.dtype) * 2 - 1
            into.copy_(wide * (1 + torch.finfo(tensor.dtype).eps * uniform))
        return moved

    def after(module: nn.Module, inputs: Any, output: Any) -> Any:
        return disturbed(output) if isinstance(output, torch.Tensor) else None

    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    with contextlib.ExitStack() as hooks:
        for leaf in leaves:
            hooks.callback(leaf.register_forward_hook(after).remove)
        yield


def rms(numbers: torch.Tensor) -> float:
    """Return the root mean square; NaN if a number is."""
    return float(numbers.square().mean().sqrt())
