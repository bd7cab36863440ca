"""A tool that runs the model's Python code within limits of time, memory, processes, files and output, and as far from
the machine as `isolation` can keep it. `--tools` has two names for it: one that promises no sandbox, and takes the
strongest isolation there is; one that is refused if bubblewrap does not work.
"""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from threestep.plugins.environments.calling import supervised
from threestep.plugins.environments.calling.isolation import BUBBLEWRAP, DISK_BYTES, DISK_FILES, Isolation, strongest
from threestep.plugins.environments.calling.left_folders import remove_tree
from training.utils.base.errors import ThreestepError

NO_SANDBOX, IN_BUBBLEWRAP = "python_no_sandbox", "python_bubblewrap"  # in --tools
MEMORY_BYTES = 1 << 30  # of each process, and of all together
FILE_BYTES = 1 << 20  # of each file, and of the output
OPEN_FILES = 64
PROCESSES_AT_ONCE = 64
THREADS_AT_ONCE = 512  # of all processes
_KILLED_AFTER_SECONDS = 1.0  # of a call's limit, so that the caller sees that it was slow
_SUPERVISOR_SECONDS = 5.0  # in which the supervisor ends what is left
_PROBE_SECONDS = 20.0
_POLL_SECONDS = 0.005
_SOURCE = inspect.getsource(supervised) + "\n\nmain(sys.argv[1:])\n"
_WENT_TOO_FAR = {
    supervised.TOO_MANY_PROCESSES: f"the program had more than {PROCESSES_AT_ONCE} processes",
    supervised.TOO_MANY_THREADS: f"the program had more than {THREADS_AT_ONCE} threads",
    supervised.TOO_MUCH_MEMORY: f"the program's processes took more than {MEMORY_BYTES >> 20} MiB of memory",
    supervised.TOO_MUCH_DISK: f"the program wrote more than {DISK_BYTES >> 20} MiB, or {DISK_FILES:,} files",
    supervised.TOO_SLOW: "the program took too long",
}


def python_tool(seconds: float, isolation: Isolation) -> Callable[[str], str]:
    """Return the tool. seconds: after which all its processes are killed, a moment later than a call is slow."""
    most = seconds + _KILLED_AFTER_SECONDS

    def python(code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: The program.
        """
        folder = Path(tempfile.mkdtemp(prefix="threestep_python_"))
        try:
            return _run(code, folder, most, isolation)
        finally:
            remove_tree(folder)

    return python


def isolation_of(name: str) -> Isolation:
    """The isolation that a tool of this name runs in. ThreestepError if it needs one that does not work here."""
    best = strongest(_works)
    if name == IN_BUBBLEWRAP and best is not BUBBLEWRAP:
        raise ThreestepError(
            f"--tools {IN_BUBBLEWRAP} needs bubblewrap, but {_why_not()}; install it and allow user namespaces, or "
            f"run in a container with --tools {NO_SANDBOX}, which would use {best.name} here ({best.sentence})"
        )
    return best


def _works(isolation: Isolation) -> bool:
    try:
        return python_tool(_PROBE_SECONDS, isolation)("print('works')") == "works\n"
    except (OSError, RuntimeError):
        return False


def _why_not() -> str:
    try:
        output = python_tool(_PROBE_SECONDS, BUBBLEWRAP)("print('works')")
    except FileNotFoundError:
        return "bwrap is not installed"
    except (OSError, RuntimeError) as problem:
        output = str(problem)
    return f"bwrap says: {' '.join(output.split())[:200]}"


def _run(code: str, folder: Path, seconds: float, isolation: Isolation) -> str:
    """The output of a program, errors included. Raises RuntimeError where a signal or a limit ended it."""
    limits = [
        seconds,
        MEMORY_BYTES,
        FILE_BYTES,
        OPEN_FILES,
        PROCESSES_AT_ONCE,
        THREADS_AT_ONCE,
        DISK_FILES * isolation.has_disk,
    ]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as source:
        source.write(code.encode("utf-8", "replace"))
        source.seek(0)
        process = subprocess.Popen(
            [*isolation.command(folder), sys.executable, "-I", "-S", "-c", _SOURCE, *map(str, limits)],
            cwd=folder,
            env={"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder)},
            stdin=source,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait(process.pid, seconds + _SUPERVISOR_SECONDS)
        finally:
            # The supervisor ends what the program started; where it does not, it is killed, and a namespace with it. It
            # is not reaped yet, so nobody else has its number.
            os.killpg(process.pid, signal.SIGKILL)
            ended = process.wait()
        output.seek(0)
        text = output.read(FILE_BYTES).decode("utf-8", "replace")
    if ended in _WENT_TOO_FAR:
        raise RuntimeError(_WENT_TOO_FAR[ended])
    if ended < 0 or ended > supervised.SIGNALLED:
        number = -ended if ended < 0 else ended - supervised.SIGNALLED
        raise RuntimeError(f"the program was killed by {signal.Signals(number).name}")
    if ended:
        raise RuntimeError(f"the program could not be started: {text.strip()[:200]}")
    return text


def _wait(pid: int, seconds: float) -> None:
    """Wait until a child has ended, at most so long; it stays a zombie, to be reaped."""
    deadline = time.monotonic() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
