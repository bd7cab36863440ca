"""Prefetching: a thread prepares the next step's batch while a step runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


class Ahead(Generic[Item, Made]):
    """Makes one thing ahead of its use. `make` is a pure function: it draws nothing and changes nothing that is saved,
    so that a run is the same with the thread and without, and can stop after any step.

    in_background: False makes each thing when it is needed
    """

    def __init__(self, make: Callable[[Item], Made], in_background: bool) -> None:
        self._make, self._in_background = make, in_background
        self._begun: _Making[Item, Made] | None = None

    def begin(self, item: Item) -> None:
        """Begin to make the result for `item`."""
        if self._in_background:
            self._begun = _Making(self._make, item)

    def made(self, item: Item) -> Made:
        """Return the result begun last, if it was for `item`; otherwise make it now. Raises `make`'s exception."""
        begun, self._begun = self._begun, None
        return begun.result() if begun is not None and begun.item == item else self._make(item)

    def each(self, items: Sequence[Item]) -> Iterator[Callable[[], Made]]:
        """Yield for each item what returns its result, and begins that of the next."""

        def made(number: int) -> Made:
            result = self.made(items[number])
            if number + 1 < len(items):
                self.begin(items[number + 1])
            return result

        with contextlib.closing(self):
            for number in range(len(items)):
                yield partial(made, number)

    def close(self) -> None:
        """Wait for the thread, if one runs; what it makes is dropped."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.thread.join()


class _Making(Generic[Item, Made]):
    """One thread for one thing: it ends by itself, whatever becomes of its loop."""

    def __init__(self, make: Callable[[Item], Made], item: Item) -> None:
        self.item = item
        self._make = make
        self._made: list[Made] = []
        self._problem: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="threestep ahead", daemon=True)
        self.thread.start()

    def result(self) -> Made:
        self.thread.join()
        if self._problem is not None:
            raise self._problem
        return self._made[0]

    def _run(self) -> None:
        try:
            self._made.append(self._make(self.item))
        except BaseException as problem:  # noqa: BLE001  # raised again in the loop that needs the result
            self._problem = problem
