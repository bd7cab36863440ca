"""The Python tool in each isolation that works here: a program's output, limits of time, memory, processes, disk, files
and output, whatever the program does, and what it sees of the machine."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from threestep.plugins.environments.arguments import EnvironmentArguments
from threestep.plugins.environments.calling import python_tool as module
from threestep.plugins.environments.calling.isolation import BUBBLEWRAP, NAMESPACES, PROCESSES, Isolation, strongest
from threestep.plugins.environments.calling.python_tool import (
    DISK_BYTES,
    FILE_BYTES,
    IN_BUBBLEWRAP,
    NO_SANDBOX,
    PROCESSES_AT_ONCE,
    THREADS_AT_ONCE,
    isolation_of,
    python_tool,
)
from threestep.plugins.environments.interface import Call
from threestep.plugins.environments.loading import load_environments
from threestep.plugins.environments.tests.conftest import said
from training.utils.base.errors import Mistakes, ThreestepError

SECONDS = 5.0
_NUMBERS = itertools.count(1)


def works(isolation: Isolation) -> bool:
    return isolation is PROCESSES or module._works(isolation)


@pytest.fixture(scope="module", params=[BUBBLEWRAP, NAMESPACES, PROCESSES], ids=lambda each: each.name)
def isolation(request) -> Isolation:
    if not works(request.param):
        pytest.skip(f"{request.param.name} does not work here")
    return request.param


@pytest.fixture(scope="module")
def python(isolation):
    return python_tool(SECONDS, isolation)


@pytest.fixture
def mark() -> Iterator[str]:
    """Seconds of a sleep that nobody else sleeps; no process sleeps so long afterwards."""
    seconds = f"60.{os.getpid()}{next(_NUMBERS)}"
    yield seconds
    for process in sleepers(seconds):
        process.kill()


def sleepers(mark: str) -> list[psutil.Process]:
    """The processes of this machine, in whatever namespace, whose command line has the mark."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if mark in " ".join(process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def all_end(mark: str, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while sleepers(mark) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not sleepers(mark)


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(6 * 7)", "42\n"),
        ("import sys; sys.stdout.buffer.write(b'\\xff ok')", "\ufffd ok"),
        ("print('é'); 1 / 0", "ZeroDivisionError: division by zero"),
        ("import os; print(sorted(os.environ)); print(os.listdir())", "['main.py']"),
        ("raise SystemExit('bye')", "bye\n"),
        ("print('a' * 2**31)", "MemoryError"),
        ("print('a' * 10_000_000)", "a" * FILE_BYTES),
        ("open('big', 'wb').write(b'0' * 10_000_000)", "File too large"),
        ("files = [open('main.py') for _ in range(100)]", "Too many open files"),
        ("x = '\ud800'", "x"),
        ("import sys; print(sys.stdin.read())", "\n"),
    ],
)  # fmt: skip
def test_a_program_prints_within_its_limits(python, code, output):
    got = python(code)
    assert output in got if code != "x = '\ud800'" else got == ""
    assert len(got) <= FILE_BYTES and "TOKEN" not in got


@pytest.mark.parametrize("code", ["import os; os.kill(os.getpid(), 9)", "import os; os.killpg(0, 9)"])
def test_a_program_that_kills_its_process_is_an_error(python, code):
    with pytest.raises(RuntimeError, match="the program was killed by SIGKILL"):
        python(code)


def test_a_program_that_does_not_end_is_slow():
    flags = EnvironmentArguments(tools=NO_SANDBOX, tool_seconds=0.5)
    mistakes = Mistakes()
    flags.validate(mistakes)
    environments = load_environments(flags, mistakes)
    mistakes.raise_if_any()
    episode = environments.episode({"messages": [{"role": "user", "content": "?"}]}, 0)
    (tool,) = episode.reset().result(5).tools
    assert tool["function"]["name"] == "python"
    reply = episode.step(said("", Call("python", {"code": "while True: pass"}))).result(5)
    assert reply.messages[0]["content"] == "Error: no answer within 0.5 seconds" and reply.figures["slow_calls"] == 1
    environments.close()


STARTS = "import os, subprocess, sys, time\nsubprocess.Popen(['sleep', '{mark}'], start_new_session={session})\n{then}"


@pytest.mark.parametrize("session", [False, True])
@pytest.mark.parametrize("then", ["", "time.sleep(60)", "os.kill(os.getpid(), 9)"])
def test_what_a_program_started_ends_with_it(isolation, mark, session, then):
    """Also in a session of its own, however the program ends."""
    tool = python_tool(SECONDS if then != "time.sleep(60)" else 0.5, isolation)
    if then:
        with pytest.raises(RuntimeError, match="SIGKILL" if "kill" in then else "the program took too long|SIGKILL"):
            tool(STARTS.format(mark=mark, session=session, then=then))
    else:
        assert tool(STARTS.format(mark=mark, session=session, then=then)) == ""
    assert all_end(mark)


def test_an_orphan_of_an_orphan_ends_too(python, mark):
    code = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        os.execvp("sleep", ["sleep", "{mark}"])
    os._exit(0)
time.sleep(0.3)
"""
    assert python(code) == "" and all_end(mark)


def test_processes_are_bounded(python, mark):
    """Flat, and at most 150 of them; the test ends none of another program."""
    code = f"""
import os, time
for number in range(150):
    if os.fork() == 0:
        os.setsid()
        os.execvp("sleep", ["sleep", "{mark}"])
time.sleep(60)
"""
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=f"the program had more than {PROCESSES_AT_ONCE} processes"):
        python(code)
    assert all_end(mark) and time.monotonic() - began < SECONDS + 10


def test_threads_are_bounded(python):
    """Those of all processes; each small enough for the limit of its process's memory."""
    code = """
import os, threading, time
threading.stack_size(64 << 10)
os.fork()
for number in range(600):
    threading.Thread(target=time.sleep, args=[60], daemon=True).start()
time.sleep(60)
"""
    with pytest.raises(RuntimeError, match=f"the program had more than {THREADS_AT_ONCE} threads"):
        python(code)


@pytest.mark.parametrize("code", [
    "for number in range(99): open(f'/dev/shm/threestep_test_{number}', 'wb').write(b'0' * (1 << 20))",
    "for number in range(10000): open(f'/dev/shm/threestep_test_{number}', 'w').close()",
])  # fmt: skip
def test_named_shared_memory_is_a_disk_of_its_own(isolation, python, code):
    if not isolation.has_disk:
        return
    with pytest.raises(RuntimeError, match="the program wrote more than 64 MiB, or 4,096 files"):
        python(f"import time\ntry:\n    {code}\nexcept OSError: pass\ntime.sleep(9)")
    assert python("import multiprocessing\nwith multiprocessing.Lock(): print(1)") == "1\n"
    assert not [*Path("/dev/shm").glob("threestep_test_*")]


OWN_MEMORY = "held = bytearray(48 << 20); held[::4096] = b'1' * len(held[::4096])"
SHARED_MEMORY = """held = mmap.mmap(-1, 48 << 20)
        for place in range(0, len(held), 4096): held[place] = 1"""


@pytest.mark.parametrize("holds", [OWN_MEMORY, SHARED_MEMORY], ids=["own", "shared"])
def test_memory_of_all_processes_is_bounded(isolation, monkeypatch, holds):
    monkeypatch.setattr(module, "MEMORY_BYTES", 128 << 20)
    code = f"""
import mmap, os, time
for number in range(4):
    if os.fork() == 0:
        {holds}
        time.sleep(60)
time.sleep(60)
"""
    with pytest.raises(RuntimeError, match="the program's processes took more than 1024 MiB of memory"):
        python_tool(SECONDS, isolation)(code)


CALLS_ON_THE_SUPERVISOR = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
supervisor = os.getppid()
print("trace", libc.ptrace(0x4206, supervisor, 0, 0))
def tried(function, *words):
    try:
        function(*words)
        return "done"
    except OSError as refused:
        return type(refused).__name__
import resource
print("memory", tried(open, f"/proc/{supervisor}/mem", "r+b"))
print("limits", tried(resource.prlimit, supervisor, resource.RLIMIT_NOFILE, (0, 0)))
print("turn", tried(os.setpriority, os.PRIO_PROCESS, supervisor, 19), tried(os.setpriority, os.PRIO_USER, 0, 19))
print("idle", tried(os.sched_setscheduler, supervisor, os.SCHED_IDLE, os.sched_param(0)))
print("place", tried(os.sched_setaffinity, supervisor, {0}))
"""


def test_a_program_cannot_stop_nor_slow_its_supervisor(python):
    lines = python(CALLS_ON_THE_SUPERVISOR).splitlines()
    assert lines == [
        "trace -1", "memory PermissionError", "limits PermissionError", "turn PermissionError PermissionError",
        "idle PermissionError", "place PermissionError",
    ]  # fmt: skip


STOPS_ITS_SUPERVISOR = """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.ptrace.argtypes = [ctypes.c_long] * 4
libc.ptrace(0x4206, os.getppid(), 0, 0), libc.ptrace(0x4207, os.getppid(), 0, 0)  # seize and interrupt
time.sleep(0.2)
for number in range(100):
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", "{mark}"])
time.sleep(60)
"""


def test_limits_hold_for_a_program_that_would_stop_its_supervisor(python, mark):
    with pytest.raises(RuntimeError, match=f"the program had more than {PROCESSES_AT_ONCE} processes"):
        python(STOPS_ITS_SUPERVISOR.format(mark=mark))
    assert all_end(mark)


def test_there_are_no_new_namespaces_and_no_memory_out_of_sight(python):
    code = """
import ctypes, errno, os, platform
libc = ctypes.CDLL(None, use_errno=True)
tried = [lambda: libc.unshare(0x10000000), lambda: libc.shmget(0, 4096, 0o1600), lambda: libc.memfd_create(b"a", 0)]
clone = {"x86_64": 56, "aarch64": 220}[platform.machine()]
tried.append(lambda: libc.syscall(clone, ctypes.c_long(0x10000000 | 17), 0, 0, 0, 0))
for function in tried:
    print(function(), errno.errorcode[ctypes.get_errno()])
"""
    assert python(code).splitlines() == ["-1 ENOSYS", "-1 ENOSYS", "-1 ENOSYS", "-1 EPERM"]


def test_what_programs_do_every_day_still_works(python):
    code = """
import concurrent.futures, os, resource, subprocess, threading
os.nice(1)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
print(subprocess.run(["echo", "child"], capture_output=True, text=True).stdout.strip())
with concurrent.futures.ThreadPoolExecutor(4) as pool:
    print(sum(pool.map(abs, range(-3, 4))))
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, os.sched_getaffinity(0))
"""
    assert python(code).splitlines() == ["child", "12"]


def test_a_folder_of_many_levels_is_gone_afterwards(python):
    before = set(Path(tempfile.gettempdir()).glob("threestep_python_*"))
    assert python("import os\nfor n in range(1500):\n    os.mkdir('a')\n    os.chdir('a')\nprint('made')") == "made\n"
    assert set(Path(tempfile.gettempdir()).glob("threestep_python_*")) <= before


def test_a_disk_is_bounded_where_there_is_one(isolation, python):
    many = "for number in range(200): open(str(number), 'wb').write(b'0' * (1 << 20))"
    if not isolation.has_disk:
        assert "fill the disk" in isolation.sentence
        return
    said = ""
    try:
        said = python(many)
    except RuntimeError as problem:
        said = str(problem)
    assert "No space left on device" in said or f"wrote more than {DISK_BYTES >> 20} MiB" in said
    with pytest.raises(RuntimeError, match="the program wrote more than 64 MiB, or 4,096 files"):
        python(
            "import time\ntry:\n    for number in range(10000): open(str(number), 'w')\nexcept OSError: time.sleep(9)"
        )


def test_the_environment_of_the_run_is_not_seen(isolation, tmp_path):
    """By none of its processes: the program asks for each one that it sees."""
    code = """
import os
found = []
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        found.append(open(f"/proc/{pid}/environ", "rb").read())
    except OSError:
        continue
print(len(found), any(b"PLANTED_SECRET" in each for each in found))
"""
    program = (
        "import sys\nfrom threestep.plugins.environments.calling import isolation, python_tool\n"
        f"tool = python_tool.python_tool({SECONDS}, getattr(isolation, sys.argv[1]))\n"
        f"print(tool({code!r}))"
    )
    environment = {**os.environ, "A_TOKEN": "PLANTED_SECRET"}
    words = [sys.executable, "-c", program, isolation.name.upper()]
    said = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
    if isolation is PROCESSES and os.geteuid() != 0:  # root without its capabilities may not read it
        assert "see the run's processes" in isolation.sentence
    else:
        assert said.split()[1] == "False", said


def test_what_each_isolation_keeps_away(isolation, python, tmp_path):
    """What its sentence says: files, processes, network."""
    mine = tmp_path / "mine"
    mine.write_text("a file of the user's")
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"""
import os, socket
def tried(function):
    try:
        return bool(function())
    except OSError:
        return False
print(tried(lambda: open({str(mine)!r}).read()), tried(lambda: open({str(tmp_path / "new")!r}, "w")),
      os.path.exists("/proc/{os.getpid()}/stat") and "{os.getpid()}" in open("/proc/{os.getpid()}/stat").read(),
      tried(lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 2)))
"""
        reads, writes, sees, reaches = (word == "True" for word in python(code).split())
    expected = {BUBBLEWRAP: (False,) * 4, NAMESPACES: (True, True, False, False), PROCESSES: (True,) * 4}
    assert (reads, writes, sees, reaches) == expected[isolation]
    assert ("read and write files" in isolation.sentence) == reads


def test_a_program_ends_by_itself_where_the_run_has_died(isolation, mark):
    program = (
        "import sys, threading, time\nfrom threestep.plugins.environments.calling import isolation, python_tool\n"
        "tool = python_tool.python_tool(1.0, getattr(isolation, sys.argv[1]))\n"
        f"code = {STARTS.format(mark=mark, session=True, then='time.sleep(60)')!r}\n"
        "threading.Thread(target=tool, args=(code,), daemon=True).start()\ntime.sleep(0.7)\n"
        "import os; os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program, isolation.name.upper()], timeout=30, check=True)
    assert all_end(mark)


def test_the_strongest_isolation_is_taken_and_said(monkeypatch, capsys):
    for working in ((BUBBLEWRAP, NAMESPACES), (NAMESPACES,), ()):
        strongest.cache_clear()
        monkeypatch.setattr(module, "_works", lambda each, working=working: each in working)
        found = isolation_of(NO_SANDBOX)
        assert found is (*working, PROCESSES)[0]
        flags, mistakes = EnvironmentArguments(tools=NO_SANDBOX), Mistakes()
        flags.validate(mistakes)
        load_environments(flags, mistakes).close()
        said = capsys.readouterr().err
        assert f"--tools {NO_SANDBOX} runs the model's programs in {found.name}: {found.sentence}\n" == said
        if found is not BUBBLEWRAP:
            with pytest.raises(ThreestepError, match=f"--tools {IN_BUBBLEWRAP} needs bubblewrap, but .*{found.name}"):
                isolation_of(IN_BUBBLEWRAP)
        else:
            assert isolation_of(IN_BUBBLEWRAP) is BUBBLEWRAP
    strongest.cache_clear()


def test_a_missing_bubblewrap_is_said(monkeypatch):
    monkeypatch.setattr(module, "BUBBLEWRAP", replace(BUBBLEWRAP, command=lambda folder: ["no_bwrap_here"]))
    monkeypatch.setattr(module, "strongest", lambda works: PROCESSES)
    with pytest.raises(ThreestepError, match="but bwrap is not installed; install it"):
        isolation_of(IN_BUBBLEWRAP)
    monkeypatch.setattr(
        module, "BUBBLEWRAP", replace(BUBBLEWRAP, command=lambda folder: ["sh", "-c", "echo no; exit 1"])
    )
    with pytest.raises(ThreestepError, match="bwrap says: the program could not be started: no; install it"):
        isolation_of(IN_BUBBLEWRAP)
