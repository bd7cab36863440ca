"""How long each named phase of a loop takes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

OTHER = "other"


class PhaseClock:
    """Seconds by phase since the last `read`; what no phase takes is `other`. A phase inside another is taken off the
    outer one, so that all of them add up to the time that has passed. In a profiler's trace they have their names too.

    wait: called where a phase begins and ends, so that work a GPU still does counts where it was asked for.
    """

    def __init__(self, wait: Callable[[], object] | None = None) -> None:
        self._wait = wait
        self._open = [OTHER]
        self._seconds: dict[str, float] = {}
        self._since = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            with torch.profiler.record_function(name):
                yield
        finally:
            self._charge()
            self._open.pop()

    def read(self) -> dict[str, float]:
        """The seconds, and begin anew."""
        self._charge()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _charge(self) -> None:
        if self._wait is not None:
            self._wait()
        now = time.monotonic()
        name = self._open[-1]
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now


def gpu_wait(device: torch.device) -> Callable[[], object] | None:
    """What a clock waits with: until the GPU has done what it was asked, None on a CPU."""
    return functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else None


class _Clocked(Protocol):
    clock: PhaseClock


Owner = TypeVar("Owner", bound=_Clocked)
Given = ParamSpec("Given")
Result = TypeVar("Result")
Method = Callable[Concatenate[Owner, Given], Result]


def timed(name: str) -> Callable[[Method[Any, Given, Result]], Method[Any, Given, Result]]:
    """A method that is a phase of `self.clock`."""

    def decorate(method: Method[Any, Given, Result]) -> Method[Any, Given, Result]:
        @functools.wraps(method)
        def clocked(self: Any, *args: Given.args, **kwargs: Given.kwargs) -> Result:
            with self.clock.phase(name):
                return method(self, *args, **kwargs)

        return clocked

    return decorate
