"""The time that each named phase of a loop takes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

OTHER = "other"
Method = TypeVar("Method", bound=Callable[..., Any])


class PhaseClock:
    """Seconds by phase since the last `read`; time outside all phases is `other`. A nested phase does not count in the
    outer one, so that all of them add up to the time that has passed. Profiler traces show the phases' names too.

    wait: called when a phase begins and ends, so that a GPU's work counts in the phase that started it
    """

    def __init__(self, wait: Callable[[], object] | None = None) -> None:
        from torch.profiler import record_function

        self._wait, self._named = wait, record_function
        self._open = [OTHER]
        self._seconds: dict[str, float] = {}
        self._since = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            with self._named(name):
                yield
        finally:
            self._charge()
            self._open.pop()

    def read(self) -> dict[str, float]:
        """The seconds; then start again from 0."""
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
    """A clock's `wait`: until the GPU has finished its work; None on a CPU."""
    import torch

    return functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else None


def timed(name: str) -> Callable[[Method], Method]:
    """Make a method a phase of `self.clock`."""

    def decorate(method: Any) -> Any:
        @functools.wraps(method)
        def clocked(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.clock.phase(name):
                return method(self, *args, **kwargs)

        return clocked

    return decorate
