"""The Python tool: a program's output, and limits of time, memory, files and output, whatever the program does."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from training.utils.environments.arguments import EnvironmentArguments
from training.utils.environments.interface import AssistantMessage, Call
from training.utils.environments.loading import load_environments
from training.utils.environments.python_tool import FILE_BYTES, python_tool
from training.utils.run.errors import Mistakes


@pytest.fixture(scope="module")
def python():
    return python_tool(5.0)


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(6 * 7)", "42\n"),
        ("import sys; sys.stdout.buffer.write(b'\\xff ok')", "\ufffd ok"),
        ("print('é'); 1 / 0", "ZeroDivisionError: division by zero"),
        ("import os; print(sorted(os.environ)); print(os.listdir())", "['main.py', 'output']"),
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
    with pytest.raises(RuntimeError, match="the program was ended by SIGKILL"):
        python(code)


def test_a_program_that_does_not_end_is_slow():
    flags = EnvironmentArguments(tools="python_no_sandbox", tool_seconds=0.5)
    mistakes = Mistakes()
    flags.validate(mistakes)
    environments = load_environments(flags, mistakes)
    mistakes.raise_if_any()
    episode = environments.episode({"messages": [{"role": "user", "content": "?"}]}, 0)
    (tool,) = episode.reset().result(5).tools
    assert tool["function"]["name"] == "python"
    reply = episode.step(AssistantMessage("", "", calls=(Call("python", {"code": "while True: pass"}),))).result(5)
    assert reply.messages[0]["content"] == "Error: no answer within 0.5 seconds" and reply.figures["slow_calls"] == 1
    environments.close()


def test_what_a_program_started_ends_with_it(python):
    sleeper = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    pid = int(python(f"import subprocess, sys; print(subprocess.Popen({sleeper}).pid)"))
    deadline = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_program_ends_by_itself_where_the_run_has_died(tmp_path):
    program = (
        "import os, threading, time\n"
        "from training.utils.environments.python_tool import python_tool\n"
        "code = 'import os, time; open(\"' + os.sys.argv[1] + '\", \"w\").write(str(os.getpid())); time.sleep(60)'\n"
        "threading.Thread(target=python_tool(0.01), args=(code,), daemon=True).start()\n"
        "while not os.path.exists(os.sys.argv[1]): time.sleep(0.01)\n"
    )
    place = str(tmp_path / "pid")
    subprocess.run([sys.executable, "-c", program, place], timeout=30, check=True)
    pid = int(open(place).read())
    deadline = time.monotonic() + 10
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(pid)
