"""Sums and gathers over all ranks. With one process each returns what it was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from training.utils.run.errors import ThreestepError

Given = TypeVar("Given")


def several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def summed(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of `values` over all ranks; the argument keeps its values."""
    total = values.detach().clone()
    if several_ranks():
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total


def summed_numbers(numbers: dict[str, float], device: torch.device) -> dict[str, float]:
    """Return each number summed over all ranks in one collective. Every rank passes the same names.

    In float64: counts and sums stay exact up to 2**53.
    """
    names = sorted(numbers)
    total = summed(torch.tensor([float(numbers[name]) for name in names], dtype=torch.float64, device=device))
    return dict(zip(names, total.tolist(), strict=True))


def gathered(item: Any) -> list[Any]:
    """Return every rank's `item`, in the order of ranks, on every rank. For small things only."""
    if not several_ranks():
        return [item]
    items: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def from_main(item: Any) -> Any:
    """Return rank 0's `item` on every rank."""
    if not several_ranks():
        return item
    items = [item]
    dist.broadcast_object_list(items, src=0)
    return items[0]


def on_main(act: Callable[[], Given], is_main: bool) -> Given:
    """Return what `act` gives on rank 0, on every rank; a ThreestepError that it raises there is raised everywhere."""
    answer: Any = None
    mistake = None
    if is_main:
        try:
            answer = act()
        except ThreestepError as error:
            mistake = str(error)
    answer, mistake = from_main((answer, mistake))
    if mistake is not None:
        raise ThreestepError(mistake)
    return answer


def barrier() -> None:
    """Wait until every rank is here."""
    if several_ranks():
        dist.barrier()


def largest(number: int, device: torch.device) -> int:
    """Return the largest `number` of all ranks."""
    if not several_ranks():
        return number
    value = torch.tensor(number, dtype=torch.int64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return int(value)
