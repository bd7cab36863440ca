"""Other runs in a run's folder: an earlier one is refused, or removed by `--overwrite`, and one at a time writes
there. The system releases the lock when its holder is killed. Cheap to import."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from training.utils.base.errors import ThreestepError
from training.utils.base.storage import read_json_object, try_lock
from training.utils.plugins.registry import added
from training.utils.run.run_folder import make_output_dir
from training.utils.run.trackers import WRITTEN

if TYPE_CHECKING:
    from training.utils.checkpoints.folder import CheckpointFolder
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.plugins.plugin import RunFile

_SUMMARY = "summary.json"
_FIGURES = (_SUMMARY, "reward_report.json")
_VERDICTS = "verdicts"  # of rewards that ask a service, which would be given again
_OF_A_FINISHED_RUN = (_SUMMARY, "model/config.json", "model/adapter_config.json")


def check_earlier_run(folder: CheckpointFolder, *, resumes: bool) -> None:
    """ThreestepError if a new run would overwrite one that is finished, or the checkpoints of one; or if a run to be
    resumed is finished and left no checkpoints: it would start again."""
    steps, run = folder.steps(), folder.path.parent
    if resumes:
        if not steps and (run / _SUMMARY).exists():
            raise ThreestepError(
                f"--resume: {run} holds a finished run ({_SUMMARY}) but no checkpoint to resume from, because it "
                "ran without --save_at_end; use another --output_dir, or add --overwrite to replace that run"
            )
        return
    if steps:
        raise ThreestepError(
            f"{folder.path} holds checkpoints of an earlier run, up to step {steps[-1]}; add --resume to continue "
            "it, use another --output_dir, or add --overwrite to replace that run"
        )
    left = [name for name in _OF_A_FINISHED_RUN if (run / name).exists()]
    if left:
        raise ThreestepError(
            f"--output_dir {run} holds a finished run ({', '.join(left)}); use another --output_dir, or add "
            "--overwrite to replace that run"
        )


def remove_earlier_run(folder: CheckpointFolder, *, figures_alone: bool = False) -> None:
    """Remove the figures of an earlier run's model, also of one that was killed; and its checkpoints, verdicts and
    folders of results. A new run replaces its other files, the model at its end."""
    run, files = folder.path.parent, dict[str, "RunFile"](added("run_files", _FIGURES))
    results = [*_FIGURES, *(name for name, file in files.items() if file.is_result)]
    folders = [name for name in results if name.endswith("/")]
    for place in () if figures_alone else (folder.path, run / _VERDICTS, *(run / name for name in folders)):
        shutil.rmtree(place, ignore_errors=True)
    for name in set(results).difference(folders):
        (run / name).unlink(missing_ok=True)


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
    from training.utils.engine.ranks.collectives import on_main

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
        f"--output_dir {path.parent} is in use by a run: process {pid} on {host}, since {since}; wait until it ends, "
        "or use another --output_dir"
    )
