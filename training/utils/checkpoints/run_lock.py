"""One run at a time in an output folder. The system releases the lock when its holder is killed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from training.utils.base.errors import ThreestepError
from training.utils.base.storage import read_json_object, try_lock
from training.utils.engine.ranks.collectives import on_main
from training.utils.plugins.registry import added
from training.utils.run.run_paths import make_output_dir
from training.utils.trackers.table import WRITTEN

if TYPE_CHECKING:
    from training.utils.engine.ranks.startup import Ranks

_NAME = ".running"
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # of file systems that have none
# A process forked by a killed run holds its lock until it notices that its parent is gone.
_PATIENCE_SECONDS = 3.0


@contextlib.contextmanager
def only_run(output_dir: str | Path) -> Iterator[None]:
    """Lock the folder, which is made if missing. ThreestepError if another run, which it names, holds it, or if a run
    could not write there."""
    path = Path(output_dir) / _NAME
    handle = None
    is_new = not path.parent.exists()
    try:
        make_output_dir(output_dir, (*WRITTEN, *added("run_files", WRITTEN)))
        handle = _held(path)
    except OSError as problem:
        if problem.errno not in _WITHOUT_LOCKS:
            raise ThreestepError(f"--output_dir {output_dir} cannot be written to ({problem.strerror})") from problem
    try:
        yield
    finally:
        if handle is not None:  # None: a file system without locks
            with contextlib.suppress(OSError):
                os.unlink(path)
            with contextlib.suppress(OSError):  # it is closed all the same
                os.close(handle)
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty
                path.parent.rmdir()


@contextlib.contextmanager
def only_run_in(output_dir: str, ranks: Ranks) -> Iterator[None]:
    """As `only_run`, held by rank 0; the ThreestepError is raised on every rank. A collective."""
    with contextlib.ExitStack() as held:
        on_main(lambda: held.enter_context(only_run(output_dir)), ranks.is_main)
        yield


def _held(path: Path) -> int:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (handle := try_lock(str(path))) is None:
        if time.monotonic() > deadline:
            raise ThreestepError(_refusal(path))
        time.sleep(0.1)
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    try:
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps(owner).encode())
    except OSError:
        os.close(handle)
        raise
    return handle


def _refusal(path: Path) -> str:
    owner = read_json_object(str(path)) or {}
    pid, host, since = (owner.get(name, "unknown") for name in ("pid", "host", "since"))
    return (
        f"--output_dir {path.parent} is in use by a run: process {pid} on {host}, since {since}; wait for its end or "
        "give another --output_dir"
    )
