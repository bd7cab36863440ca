"""A file of lines that grows with a run. A disk that refuses some delays them, and ends nothing."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from training.utils.base.console import log
from training.utils.base.errors import disk_errors

_MOST_WAITING_BYTES = 64 * 2**20  # a line of metrics has about one kilobyte


class RunLog:
    """Lines appended to the file `path`. Those that the disk refuses wait in memory, and are written with the next.

    A line that arrived in part is cut off before it is written again. Of those that wait, the oldest are given up
    beyond 64 MiB. The first refusal is one warning; `settle` logs at the end what is lost.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._whole_bytes: int | None = None  # the file's size without a line in part; None: as it is
        self._given_up = 0
        self._refused: OSError | None = None

    def append(self, lines: Iterable[str]) -> None:
        """Write `lines`, each without its newline, or let them wait."""
        for line in lines:
            self._waiting.append(line.encode("utf-8", "replace") + b"\n")  # half a surrogate pair is not UTF-8
            self._waiting_bytes += len(self._waiting[-1])
        self._try_to_write()
        while self._waiting_bytes > _MOST_WAITING_BYTES:
            self._waiting_bytes -= len(self._waiting.popleft())
            self._given_up += 1

    def settle(self) -> None:
        """Try once more; log what is lost, or that lines had to wait."""
        self._try_to_write()
        lost = self._given_up + len(self._waiting)
        if lost:
            log(f"warning: {lost:,} lines of {self.path} are lost ({_reason(self._refused)})")
        elif self._refused is not None:
            log(f"{self.path} is complete: the lines that the disk refused before are written")
        self._refused, self._given_up = None, 0

    def _try_to_write(self) -> None:
        if not self._waiting:
            return
        try:
            with disk_errors(self.path):
                self._write(b"".join(self._waiting))
        except OSError as problem:
            if self._refused is None:
                log(
                    f"warning: {self.path} cannot be written ({_reason(problem)}); its lines wait in memory, and "
                    "training goes on"
                )
            self._refused = problem
            return
        self._waiting.clear()
        self._waiting_bytes = 0

    def _write(self, content: bytes) -> None:
        with open(self.path, "ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if self._whole_bytes is not None and size > self._whole_bytes:
                os.ftruncate(file.fileno(), self._whole_bytes)
                size = self._whole_bytes
            self._whole_bytes = size
            rest = memoryview(content)
            while rest:
                rest = rest[file.write(rest) or 0 :]
        self._whole_bytes = None


def _reason(problem: OSError | None) -> str:
    return str(problem.strerror if problem is not None else "they were too many to wait")
