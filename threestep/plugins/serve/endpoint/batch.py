"""The thread that draws: requests wait in line, join the batch as there is room, and leave it when they end."""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from threestep.plugins.serve.endpoint.lines import Event, Line, Order, Rows
from threestep.plugins.serving.refusals import RefusedRequest
from training.utils.base.machine import is_out_of_memory

_MOST_JOINING_TOKENS = 8192  # of prompts that are computed together, padding counted; one prompt may be longer
_ENDING = "the server is shutting down; send the request again once it is back"


class Batch:
    """Draws the answers of all requests. Which tokens an answer has depends on its prompt and its seed; how numbers are
    rounded depends on the rows beside it, so that a draw at the very edge between two tokens may fall otherwise."""

    def __init__(self, rows: Callable[[], Rows], most_rows: int, most_waiting: int) -> None:
        """rows: makes what draws, anew after a failure. most_waiting: answers that wait for a row."""
        self._make_rows, self._rows = rows, rows()
        self._most_rows, self._most_waiting = most_rows, most_waiting
        self._waiting: deque[Line] = deque()
        self._joining: list[Line] = []
        self._changed = threading.Condition()
        self._refusing = self._closed = False
        self._thread = threading.Thread(target=self._run, name="drawing", daemon=True)

    def start(self) -> None:
        """Begin to draw."""
        self._thread.start()

    def submit(self, orders: Sequence[Order]) -> tuple[list[Line], SimpleQueue[Event]]:
        """Return the lines of a request, in the order of `orders`, and the queue of their news. RefusedRequest where
        too many wait already, and once the server is ending."""
        events = SimpleQueue[Event]()
        lines = [Line(order, place, events) for place, order in enumerate(orders)]
        with self._changed:
            if self._refusing:
                raise RefusedRequest(_ENDING, 503)
            waiting = sum(not line.is_over for line in self._waiting)
            if waiting + len(lines) > self._most_waiting:
                raise RefusedRequest(
                    f"{waiting} responses are waiting, and {len(lines)} more would exceed the limit (--max_waiting "
                    f"{self._most_waiting}); send the request again later",
                    429,
                    code="rate_limit_exceeded",
                )
            self._waiting += lines
            self._changed.notify()
        return lines, events

    @property
    def drawing(self) -> int:
        """The number of answers that are being drawn, or wait."""
        with self._changed:
            lines = (*self._rows.lines, *self._joining, *self._waiting)  # one that joins may be in two of them
            return len({id(line) for line in lines if not line.is_over})

    def close(self, seconds: float) -> None:
        """Take no more requests; wait for those that are there, so long at most, and fail the others."""
        with self._changed:
            self._refusing = True
        deadline = time.monotonic() + seconds
        while self.drawing and time.monotonic() < deadline:
            time.sleep(0.02)
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    @torch.no_grad()
    def _run(self) -> None:
        while (joining := self._next()) is not None:
            try:
                self._rows.leave()
                if joining:
                    self._rows.join(joining)
                    self._joining = []
                if any(not line.is_over for line in self._rows.lines):
                    self._rows.step()
            except Exception as problem:  # noqa: BLE001 - the server outlives whatever a forward raises
                self._fail([*self._rows.lines, *joining], problem)
        self._fail([*self._rows.lines, *self._waiting], RefusedRequest(_ENDING, 503))

    def _next(self) -> list[Line] | None:
        """Wait until there is something to draw; return the lines that join. None: the end."""
        with self._changed:
            while not (self._closed or self._waiting or self._rows.lines):
                self._changed.wait()
            if self._closed:
                return None
            free = self._most_rows - sum(not line.is_over for line in self._rows.lines)
            joining, longest = list[Line](), 0
            while self._waiting and len(joining) < free:
                longest = max(longest, len(self._waiting[0].order.ids))
                if joining and longest * (len(joining) + 1) > _MOST_JOINING_TOKENS:
                    break
                line = self._waiting.popleft()
                joining += [] if line.is_over else [line]
            self._joining = joining
            return joining

    def _fail(self, lines: Sequence[Line], problem: Exception) -> None:
        if is_out_of_memory(problem):
            problem = RefusedRequest("out of memory; start the server with a lower --max_rows", 503)
        elif not isinstance(problem, RefusedRequest):
            traceback.print_exception(problem)
            problem = RefusedRequest("the server failed; see its log", 500)
        for line in lines:
            line.fail(problem)
        self._rows = self._make_rows()
