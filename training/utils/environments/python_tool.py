"""A tool that runs the model's Python code in a process with limits. It is no sandbox: the code reads what the run's
user may read, and reaches the network. Hence the name by which `--tools` asks for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

NO_SANDBOX = "python_no_sandbox"  # in --tools
MEMORY_BYTES = 1 << 30  # of each process
FILE_BYTES = 1 << 20  # of each file, and of the output
OPEN_FILES = 64
_KILLED_AFTER_SECONDS = 1.0  # of a call's limit, so that the caller sees that it was slow
_POLL_SECONDS = 0.005

# Limits are set in the child and hold for the program that takes its place; the alarm ends it where the run has died.
_LIMITED = """
import os, resource, signal, sys
seconds, memory, file_bytes, files = map(int, sys.argv[1:5])
for name, most in (("CPU", seconds), ("AS", memory), ("FSIZE", file_bytes), ("NOFILE", files), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
signal.alarm(seconds)
os.execv(sys.executable, [sys.executable, "-I", "-X", "utf8", "main.py"])
"""


def python_tool(seconds: float) -> Callable[[str], str]:
    """Return the tool. seconds: after which its process group is killed, a moment later than a call is slow."""
    most = seconds + _KILLED_AFTER_SECONDS

    def python(code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: The program.
        """
        with tempfile.TemporaryDirectory(prefix="threestep_python_", ignore_cleanup_errors=True) as folder:
            return _run(code, Path(folder), most)

    return python


def _run(code: str, folder: Path, seconds: float) -> str:
    """The output of a program, errors included. Raises RuntimeError where a signal ended its process."""
    (folder / "main.py").write_text(code, encoding="utf-8", errors="replace")
    limits = [str(int(seconds) + 1), str(MEMORY_BYTES), str(FILE_BYTES), str(OPEN_FILES)]
    with open(folder / "output", "w+b") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LIMITED, *limits],
            cwd=folder,
            env={"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait(process.pid, seconds)
        finally:
            # Also what the program started. The leader is not reaped yet, so nobody else has its number.
            os.killpg(process.pid, signal.SIGKILL)
            ended = process.wait()
        output.seek(0)
        text = output.read(FILE_BYTES).decode("utf-8", "replace")
    if ended < 0:
        raise RuntimeError(f"the program was ended by {signal.Signals(-ended).name}")
    return text


def _wait(pid: int, seconds: float) -> None:
    """Wait until a child has ended, at most so long; it stays a zombie, to be reaped."""
    deadline = time.monotonic() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
