"""Python programs that tests start by a fork of a process which has imported everything once.

A start costs eight seconds of imports otherwise, of every rank. The fork runs the same file or module as `__main__`,
with the environment, arguments and output files that it would have as a process of its own. It is such a process in the
long form of the tests, and where a library reads other variables, as it is imported, than the server had.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import connection, forkserver
from pathlib import Path

ROOT = Path(__file__).parents[2]
FORKS_VARIABLE = "THREESTEP_TEST_FORKS"  # 0: every program is a process of its own
# What libraries read as they are imported, or when a process starts.
_READ_AT_START = (
    "CUDA_", "DS_", "HF_", "LD_", "MALLOC_", "MKL_", "NCCL_", "OMP_", "TORCHINDUCTOR_",
    "TRANSFORMERS_", "XDG_",
)  # fmt: skip
_OF_THE_SERVER = {
    "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "MKL_NUM_THREADS": "1", "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
# Of a process on the CPU that finds this checkout.
ON_CPU = {
    "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)
}  # fmt: skip
_STARTING = threading.Lock()
# A start asks for every fork's exit code (`multiprocessing.process._cleanup`). Of two threads that ask for one at the
# same time the second finds it read, and puts 255 in its place.
_ASKING = threading.Lock()
_GRACE_SECONDS = 5.0  # how long the other ranks may still speak after one has failed


class ForkedProgram:
    """A program in a forked process, with the words of subprocess.Popen. Its process leads a group of its own."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], stdout: Path, stderr: Path, folder: Path):
        _start_server()
        self._process = multiprocessing.get_context("forkserver").Process(
            target=_run, args=(list(words), dict(environment), str(stdout), str(stderr), str(folder))
        )
        with _ASKING:
            self._process.start()
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        with _ASKING:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        connection.wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code


Program = ForkedProgram | subprocess.Popen[bytes]


def start_python(
    words: Sequence[str], environment: Mapping[str, str], stdout: Path, stderr: Path, folder: Path | None = None
) -> Program:
    """Start `python WORDS` (`-m MODULE ...`, `-c CODE ...` or `FILE ...`) in a session of its own, its output appended
    to the files."""
    folder = folder or Path.cwd()
    if may_fork(environment):
        return ForkedProgram(words, environment, stdout, stderr, folder)
    with open(stdout, "ab") as out, open(stderr, "ab") as err:
        return subprocess.Popen(
            [sys.executable, *words], env=dict(environment), stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            cwd=folder, start_new_session=True,
        )  # fmt: skip


def run_python(
    words: Sequence[str],
    environment: Mapping[str, str] | None = None,
    ranks: int = 1,
    folder: Path | None = None,
    timeout_seconds: float = 600.0,
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` on so many ranks, as subprocess.run does with text that it captures; of a run that fails the
    code is that of the first rank to do so. As under a launcher, a rank that fails ends the others.

    Raises subprocess.TimeoutExpired.
    """
    with tempfile.TemporaryDirectory(prefix="threestep_program_") as place:
        stdout, stderr = Path(place, "stdout.txt"), Path(place, "stderr.txt")
        variables = os.environ if environment is None else environment
        code = _run_ranks(words, variables, ranks, (stdout, stderr, folder or Path.cwd()), timeout_seconds)
        said = [path.read_text(encoding="utf-8", errors="replace") for path in (stdout, stderr)]
    return subprocess.CompletedProcess(list(words), code, *said)


def _run_ranks(
    words: Sequence[str],
    environment: Mapping[str, str],
    ranks: int,
    places: tuple[Path, Path, Path],
    timeout_seconds: float,
) -> int:
    of_rank = [dict(environment)]
    if ranks > 1:
        from training.utils.run.launch import free_port

        meet = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        of_rank = [{**environment, **meet, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    programs = [start_python(words, variables, *places) for variables in of_rank]
    failed = wait_for(programs, timeout_seconds)
    return 0 if failed is None else _code(programs[failed])


def wait_for(programs: Sequence[Program], timeout_seconds: float) -> int | None:
    """Wait for all to end well; return the place of the first that fails, which ends the others, if one does.

    Raises subprocess.TimeoutExpired. None is left in any case.
    """
    deadline = time.monotonic() + timeout_seconds
    failed: int | None = None
    try:
        while True:
            waits = any(program.poll() is None for program in programs)
            if failed is None and (failed := _first_failed(programs)) is not None:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            if not waits or (failed is not None and time.monotonic() > deadline):
                return failed
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the programs", timeout_seconds)
            time.sleep(0.01)
    finally:
        for program in programs:
            end(program)


def _first_failed(programs: Sequence[Program]) -> int | None:
    return next((place for place, program in enumerate(programs) if _code(program)), None)


def end(program: Program) -> None:
    """Kill the program and what it started, and wait for it."""
    for kill in (os.killpg, os.kill):  # a fork leads no group of its own in its first moment
        if program.poll() is None or kill is os.killpg:
            with suppress(ProcessLookupError):
                kill(program.pid, signal.SIGKILL)
    program.wait()


def _code(program: Program) -> int:
    """As a shell tells it; 0 while it runs."""
    code = program.poll() or 0
    return code if code >= 0 else 128 - code


def may_fork(environment: Mapping[str, str]) -> bool:
    """Whether a program in this environment may be a fork of the server, which knows no GPU."""
    if os.environ.get(FORKS_VARIABLE) == "0" or not sys.platform.startswith("linux"):
        return False
    if environment.get("DS_ACCELERATOR") != "cpu" and environment.get("CUDA_VISIBLE_DEVICES") != "" and _has_cuda():
        return False
    servers = _server_environment()
    return all(
        environment.get(name, _OF_THE_SERVER.get(name)) == servers.get(name)
        for name in {*environment, *servers}
        if name.startswith(_READ_AT_START)
    )


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@cache
def _server_environment() -> dict[str, str]:
    """What the libraries read that the server imported."""
    return {**os.environ, **_OF_THE_SERVER}


def _start_server() -> None:
    """One serves all the tests of this process, and ends with it."""
    with _STARTING:
        multiprocessing.set_forkserver_preload(["tests.support.everything"])
        wanted = {**_server_environment(), "PYTHONPATH": str(ROOT)}
        before = {name: os.environ.get(name) for name in (*_OF_THE_SERVER, "PYTHONPATH")}
        try:
            os.environ.update({name: wanted[name] for name in before})
            forkserver.ensure_running()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _run(words: list[str], environment: dict[str, str], stdout: str, stderr: str, folder: str) -> None:
    """In the fork: become the program."""
    os.setsid()
    for number, path in ((1, stdout), (2, stderr)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(handle, number)
        os.close(handle)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    _as_if_new()
    code = 0
    try:
        _run_as_main(words)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  # as the interpreter itself
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as a process at its end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def _as_if_new() -> None:
    """Nothing that the forks of one server would share: random states, and the semaphore of tqdm."""
    import numpy
    from tqdm import tqdm

    random.seed()
    numpy.random.seed()
    tqdm.set_lock(threading.RLock())
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run_as_main(words: list[str]) -> None:
    for path in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if path and path not in sys.path:
            sys.path.insert(0, path)
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(words[1], None)  # or runpy warns of it
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
