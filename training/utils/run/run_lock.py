"""One run at a time in an output folder. The system lets go of the lock where its holder is killed."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from training.utils.run.errors import ThreestepError
from training.utils.run.storage import read_json_object, try_lock

_NAME = ".running"
# A process that a killed run had forked holds its lock until it notices that its parent is gone.
_PATIENCE_SECONDS = 3.0


@contextlib.contextmanager
def only_run(output_dir: str | Path) -> Iterator[None]:
    """Hold the folder, made where it is missing. ThreestepError, which names the other run, where one holds it."""
    path = Path(output_dir) / _NAME
    handle = None
    is_new = not path.parent.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _held(path)
    except OSError as problem:
        if not os.access(path.parent, os.W_OK):
            raise ThreestepError(f"--output_dir {output_dir} cannot be written to ({problem.strerror})") from problem
    try:
        yield
    finally:
        if handle is not None:  # there are file systems without locks
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(handle)
        if is_new:
            with contextlib.suppress(OSError):  # something was left in it
                path.parent.rmdir()


def _held(path: Path) -> int:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (handle := try_lock(str(path))) is None:
        if time.monotonic() > deadline:
            raise ThreestepError(_refusal(path))
        time.sleep(0.1)
    about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    os.ftruncate(handle, 0)
    os.write(handle, json.dumps(about).encode())
    return handle


def _refusal(path: Path) -> str:
    about = read_json_object(str(path)) or {}
    pid, host, since = (about.get(name, "unknown") for name in ("pid", "host", "since"))
    return (
        f"--output_dir {path.parent} belongs to a run that is under way: process {pid} on {host}, since {since}; wait "
        "for its end or give another --output_dir"
    )
