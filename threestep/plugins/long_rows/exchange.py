"""Collectives of a sequence group, with gradients: slices of all heads <-> whole rows of some heads, and sums.

Ulysses (Jacobs et al. 2023, arXiv:2309.14509): before attention each rank has t tokens of all heads, in attention all
T tokens of its share of the heads. One exchange each way, and the same backward.

N rows, T tokens in a row, P ranks of the group, t = ceil(T / P) tokens of a slice, A query heads, K heads of queries,
keys or values, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from threestep.plugins.long_rows.group import SequenceGroup


def rows_of_heads(parts_NKtD: Sequence[torch.Tensor], tokens: int, group: SequenceGroup) -> list[torch.Tensor]:
    """Return [N, K/P, T, D] of each part, rank r's share of its heads on rank r, in one exchange.

    parts_NKtD: P divides the heads of each. tokens: T; what fills the last slice is dropped.
    """
    size = group.size
    sent = [part.unflatten(1, (size, -1)).transpose(0, 1) for part in parts_NKtD]  # [P, N, K/P, t, D]
    received = _Exchange.apply(torch.cat([part.flatten(1) for part in sent], dim=1), group.group)
    found = []
    for part, shape in zip(received.split([part[0].numel() for part in sent], dim=1), sent, strict=True):
        row_NKtD = part.view(shape.shape).permute(1, 2, 0, 3, 4).flatten(2, 3)
        found.append(row_NKtD[:, :, :tokens])
    return found


def slices_of_rows(output_NTaD: torch.Tensor, length: int, group: SequenceGroup) -> torch.Tensor:
    """Return [N, t, A, D], this rank's slice of all heads, of attention's output: whole rows of A/P heads each.

    length: t
    """
    missing = group.size * length - output_NTaD.shape[1]
    whole = torch.nn.functional.pad(output_NTaD, (0, 0, 0, 0, 0, missing))
    sent = whole.unflatten(1, (group.size, length)).transpose(0, 1)  # [P, N, t, A/P, D]
    received = _Exchange.apply(sent, group.group)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def shareable(key_NKtD: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Return key or value heads, each repeated as often as P needs to share them out evenly.

    The query heads that read a key head are neighbours, so rank r's shares of both belong together. 8 query heads, 1
    key head, P 2: the head goes to both ranks. 12 query heads, 3 key heads, P 2: the keys 0 0 1 1 2 2, of which rank 0
    has 0 0 1 for its 6 query heads, two each.
    """
    heads = key_NKtD.shape[1]
    copies = math.lcm(heads, group.size) // heads
    return key_NKtD if copies == 1 else key_NKtD.repeat_interleave(copies, dim=1)


def summed_over_group(values: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Return the sum over the group's ranks. Its gradient is this rank's alone: the ranks compute the same loss of the
    sum, and each one's weights get the gradient of its summand."""
    total: torch.Tensor = _Sum.apply(values, group.group)
    return total


def brought_to_group(values: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Return the sum over the group's ranks, of which each uses what it needs: the gradient is the sum of theirs."""
    total: torch.Tensor = _Bring.apply(values, group.group)
    return total


class _Exchange(torch.autograd.Function):
    """Part r of [P, ...] goes to rank r; part s of the result is from rank s."""

    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _all_to_all(sent, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


def _all_to_all(sent: torch.Tensor, group: Any) -> torch.Tensor:
    sent = sent.contiguous()  # first: a tensor like one with other strides has these
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


class _Sum(torch.autograd.Function):
    """See `summed_over_group`."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        return _all_reduce(values, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Bring(torch.autograd.Function):
    """See `brought_to_group`."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _all_reduce(values, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _all_reduce(grads[0], ctx.group), None


def _all_reduce(values: torch.Tensor, group: Any) -> torch.Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
