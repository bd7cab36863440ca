"""Sums, gathers and agreement over all ranks. With one process, each returns its argument."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from training.utils.base.errors import ThreestepError, disk_error_in, disk_sentence

Given = TypeVar("Given")
_LONGEST_WAIT_SECONDS = 24 * 3600.0
_CALLS = "threestep_calls_of_rank_"


def several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def summed(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of `values` over all ranks, as a new tensor."""
    total = values.detach().clone()
    if several_ranks():
        dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total


def summed_numbers(numbers: Mapping[str, float | torch.Tensor], device: torch.device) -> dict[str, float]:
    """Return each number, or tensor of one on `device`, summed over all ranks in one collective, with one wait for the
    device. Every rank passes the same names.

    In float64: counts and sums stay exact up to 2**53.
    """
    if not numbers:
        return {}
    names = sorted(numbers)
    total = summed(torch.stack([_number(numbers[name], device) for name in names]))
    return dict(zip(names, total.tolist(), strict=True))


def _number(number: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """float64 []. Filled on the device: a copy to it would wait."""
    if isinstance(number, torch.Tensor):
        return number.detach().double()
    return torch.full((), float(number), dtype=torch.float64, device=device)


class DeviceSums:
    """Sums by name, in float64, on the device until they are read: to read one earlier would wait for it."""

    def __init__(self) -> None:
        self._sums: dict[str, float | torch.Tensor] = {}

    def add(self, numbers: Mapping[str, float | torch.Tensor]) -> None:
        """Add numbers, or tensors of one, without their gradients."""
        for name, number in numbers.items():
            value = number.detach().double() if isinstance(number, torch.Tensor) else number
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    @property
    def sums(self) -> Mapping[str, float | torch.Tensor]:
        """This rank's."""
        return self._sums

    def totals(self, device: torch.device, counted: bool = True) -> dict[str, float]:
        """The sums over all ranks (`summed_numbers`). A collective. counted: False leaves this rank's out, because
        another rank of its group has the same (`Ranks.leads`)."""
        return summed_numbers(self._sums if counted else dict.fromkeys(self._sums, 0.0), device)


def gathered(item: Any) -> list[Any]:
    """Return every rank's `item`, in the order of ranks, on every rank. For small objects only."""
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


def on_main(act: Callable[[], Given], is_main: bool, patient: bool = False) -> Given:
    """Call `act` on rank 0 and return its result, or raise its ThreestepError, on every rank. An error of the disk
    becomes one.

    patient: `act` reads or writes large files, and the other ranks wait as in `wait_for_main`.
    """
    answer: Any = None
    mistake = None
    if is_main:
        try:
            answer = act()
        except ThreestepError as error:
            mistake = str(error)
        except Exception as error:
            refusal = disk_error_in(error)
            if refusal is None:
                raise
            mistake = disk_sentence(refusal)
    if patient:
        wait_for_main()
    answer, mistake = from_main((answer, mistake))
    if mistake is not None:
        raise ThreestepError(mistake)
    return answer


def barrier() -> None:
    """Wait until every rank is here."""
    if several_ranks():
        dist.barrier()


def wait_for_main() -> None:
    """Wait until rank 0 is here too; it may be reading or writing large files alone.

    A collective gives up after --rank_timeout, which is meant for a rank that hangs. Here each rank counts its calls in
    the process group's store, and polls it for rank 0's count for up to a day; only then does the next collective's
    timeout start. The store ends with rank 0 or its launcher, and so does the wait.
    """
    if not several_ranks():
        return
    store = dist.distributed_c10d._get_default_store()
    calls = store.add(f"{_CALLS}{dist.get_rank()}", 1)
    started = time.monotonic()
    while store.add(f"{_CALLS}0", 0) < calls and (waited := time.monotonic() - started) < _LONGEST_WAIT_SECONDS:
        time.sleep(min(0.001 + waited / 10, 0.5))


def largest(number: int, device: torch.device) -> int:
    """Return the largest `number` of all ranks."""
    if not several_ranks():
        return number
    value = torch.tensor(number, dtype=torch.int64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return int(value)


class OwnRanks:
    """Agreement of a run's ranks in a group of their own: a thread that draws ahead of training may call it while
    training calls others. All ranks make it together, and call its methods together, in one order."""

    def __init__(self) -> None:
        self.rank = dist.get_rank() if several_ranks() else 0
        longest = timedelta(seconds=_LONGEST_WAIT_SECONDS)  # for the rank whose rollout takes longest
        self._group = dist.new_group(backend="gloo", timeout=longest) if several_ranks() else None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gathered(self, own: Given) -> list[Given]:
        """Return what each rank gave, once all have."""
        if self._group is None:
            return [own]
        found: list[Given] = [own] * dist.get_world_size()
        dist.all_gather_object(found, own, group=self._group)
        return found

    def from_first(self, own: Given) -> Given:
        """Return what the first rank gave; what others give is not looked at."""
        if self._group is None:
            return own
        found = [own]
        dist.broadcast_object_list(found, src=0, group=self._group)
        return found[0]
