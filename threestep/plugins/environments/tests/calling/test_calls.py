"""Calls with a limit of time, tools, and folders that they leave: whatever they do is bounded and counted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from threestep.plugins.environments.calling import calls
from threestep.plugins.environments.calling.calls import Caller, Outcome, as_text, bounded
from threestep.plugins.environments.calling.left_folders import remove_tree
from threestep.plugins.environments.calling.schemas import schema_of
from threestep.plugins.environments.calling.tool_environment import CallLimits, Tool, ToolEnvironment
from threestep.plugins.environments.interface import Call
from threestep.plugins.environments.tests.conftest import said
from training.utils.base.errors import ThreestepError


def outcome_of(caller: Caller, call, seconds: float = 5.0) -> Outcome:
    return caller.wait(caller.start(call), seconds)


async def answer_later(value: str) -> str:
    await asyncio.sleep(0.001)
    return value


def raise_it(problem: BaseException):
    raise problem


async def raise_later(problem: BaseException):
    await asyncio.sleep(0.001)
    raise problem


def test_functions_async_or_not_return_their_values(caller):
    assert outcome_of(caller, lambda: "now").value == "now"
    assert outcome_of(caller, lambda: answer_later("later")).value == "later"
    assert outcome_of(caller, lambda: asyncio.to_thread(str, 3)).value == "3"
    assert outcome_of(caller, lambda: 1 / 0).value is None


@pytest.mark.parametrize(
    "problem", [ValueError("x"), SystemExit(3), KeyboardInterrupt(), StopIteration(), TimeoutError(),
                asyncio.CancelledError()]
)  # fmt: skip
@pytest.mark.parametrize("way", [raise_it, raise_later])
def test_whatever_is_raised_is_an_outcome(caller, way, problem):
    found = outcome_of(caller, lambda: way(problem))
    assert not found.is_slow and found.problem is not None
    # Python turns a coroutine's StopIteration into a RuntimeError.
    assert isinstance(found.problem, (type(problem), RuntimeError))
    assert outcome_of(caller, lambda: answer_later("still here")).value == "still here"


@pytest.mark.parametrize("call", [threading.Event().wait, lambda: asyncio.sleep(60)])
def test_a_call_that_hangs_is_slow_and_others_go_on(caller, call):
    begin = time.monotonic()
    hanging = caller.start(call)
    assert outcome_of(caller, lambda: answer_later("other")).value == "other"
    assert caller.wait(hanging, 0.05).is_slow
    assert time.monotonic() - begin < 5


def test_an_async_function_that_blocks_its_loop_loses_it(caller, monkeypatch):
    monkeypatch.setattr(calls, "_LOOP_SECONDS", 0.05)
    go_on = threading.Event()

    async def block() -> None:
        go_on.wait()

    assert outcome_of(caller, block, 0.05).is_slow
    assert outcome_of(caller, lambda: answer_later("another loop")).value == "another loop"
    assert caller._loop.blocked() == 1
    go_on.set()


def test_calls_that_hang_are_bounded(caller, monkeypatch):
    monkeypatch.setattr(calls, "MOST_HANGING", 3)
    go_on = threading.Event()
    for _ in range(3):
        assert outcome_of(caller, go_on.wait, 0.01).is_slow
    assert "not called: 3 earlier calls have not returned" in str(outcome_of(caller, lambda: "never").problem)
    go_on.set()
    deadline = time.monotonic() + 5
    while outcome_of(caller, lambda: "now").problem is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert outcome_of(caller, lambda: "now").value == "now"


def test_hanging_calls_do_not_keep_the_program_alive():
    """Threads, coroutines, a loop that is blocked, and jobs of asyncio.to_thread."""
    program = """
import asyncio, threading, time
from threestep.plugins.environments.calling.calls import Caller
caller, never = Caller(), threading.Event()
async def block():
    never.wait()
for call in (never.wait, lambda: asyncio.to_thread(never.wait), lambda: asyncio.sleep(900), block):
    assert caller.wait(caller.start(call), 0.1).is_slow
caller.close()
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Odd:
    def __str__(self) -> str:
        return "odd"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("é", "é"), (None, ""), (b"\xc3\xa9", "é"), (b"\xff\xfeab", "\ufffd\ufffdab"), (3, "3"), (True, "true"),
        ({"a": ["é", None]}, '{"a": ["é", null]}'), (Odd(), "odd"), ({1, }, "{1}"),
    ],
)  # fmt: skip
def test_answers_become_text(value, text):
    assert as_text(value) == text


def test_long_answers_are_cut_and_what_cannot_be_encoded_is_mended():
    text, was_cut, was_mended = bounded("a" * 500_000 + "b" * 500_000, 200)
    assert len(text) <= 200 and was_cut and not was_mended
    assert text.startswith("aaaa") and text.endswith("bbbb") and "cut: the whole text has 1,000,000 characters" in text
    assert bounded("a" * 200, 200) == ("a" * 200, False, False)
    for limit in range(1, 120):
        assert len(bounded("x" * 10_000, limit).text) <= limit
    text, _, was_mended = bounded("a\ud800b", 100)
    assert was_mended and text == "a?b"
    assert bounded(as_text(b"\xff"), 100).was_mended and not bounded("\x00 <|im_end|>", 100).was_mended


def alarmed():
    """A limit of time whose refusal the function answers itself, as Math-Verify does."""
    try:
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
    except ValueError:
        return 0.0
    return 1.0


async def alarmed_later():
    return alarmed()


@pytest.mark.parametrize("call", [alarmed, alarmed_later])
def test_an_alarm_is_an_error_though_the_function_catches_it(caller, call):
    with pytest.raises(
        ThreestepError, match=r"time limit with signals \(signal.signal\), which works only in the main"
    ):
        outcome_of(caller, call)


NEVER = threading.Event()


def slow_echo(text: str, seconds: float) -> str:
    """Say it later.

    Args:
        text: What.
        seconds: When.
    """
    time.sleep(seconds)
    return text


async def async_echo(text: str) -> str:
    """Say it.

    Args:
        text: What.
    """
    await asyncio.sleep(0.001)
    return text


def fail() -> str:
    """Fail."""
    raise OSError("no disk\nsecond line")


def leave() -> str:
    """Exit."""
    raise SystemExit(1)


def hang() -> str:
    """Hang."""
    NEVER.wait()
    return "late"


def megabyte() -> str:
    """Much."""
    return "m" * 1_000_000


def broken_bytes() -> bytes:
    """Bytes."""
    return b"ok \xff\xfe"


TOOLS = [
    Tool(function, schema_of(function, "--tools"))
    for function in (slow_echo, async_echo, fail, leave, hang, megabyte, broken_bytes)
]


@pytest.fixture
def environment(caller):
    made = ToolEnvironment(TOOLS, CallLimits(seconds=0.3, characters=200, calls=4), caller)
    made.reset({"messages": [{"role": "user", "content": "go"}]})
    return made


def test_it_opens_with_the_rows_messages_and_ends_without_a_call(environment):
    prompt = [{"role": "user", "content": "go"}]
    opening = environment.reset({"messages": prompt})
    assert opening.messages == prompt and opening.messages is not prompt
    assert [tool["function"]["name"] for tool in opening.tools][:2] == ["slow_echo", "async_echo"]
    reply = environment.step(said("4"))
    assert (reply.messages, reply.reward, reply.done) == ([], 0.0, True)
    assert not any(reply.figures.values())


def test_a_tool_may_change_its_arguments(caller):
    """Also where a parser gave one object to two calls."""

    def empty(items: list[str]) -> str:
        """Take all.

        Args:
            items: What.
        """
        taken = " ".join(items)
        items.clear()
        return taken

    made = ToolEnvironment([Tool(empty, schema_of(empty, "--tools"))], CallLimits(5.0, 200, 4), caller)
    arguments = {"items": ["a", "b"]}
    reply = made.step(said("", Call("empty", arguments), Call("empty", arguments)))
    assert [message["content"] for message in reply.messages] == ["a b", "a b"] and arguments == {"items": ["a", "b"]}


def test_parallel_calls_run_at_once_and_keep_their_order(environment):
    calls = [Call("slow_echo", {"text": str(wait), "seconds": wait}) for wait in (0.2, 0.1, 0.15)]
    begin = time.monotonic()
    reply = environment.step(said("", *calls, Call("async_echo", {"text": "last"})))
    assert time.monotonic() - begin < 0.45
    assert [message["content"] for message in reply.messages] == ["0.2", "0.1", "0.15", "last"]
    assert {message["role"] for message in reply.messages} == {"tool"} and not reply.done
    assert reply.messages[3]["name"] == "async_echo" and reply.figures["calls"] == 4
    assert 0.1 < reply.figures["tool_seconds"] < 0.45


@pytest.mark.parametrize(
    ("call", "text", "figure"),
    [
        (Call("fail", {}), "Error: OSError: no disk", "failed_calls"),
        (Call("leave", {}), "Error: SystemExit: 1", "failed_calls"),
        (Call("hang", {}), "Error: no answer within 0.3 seconds", "slow_calls"),
        (Call("async_eco", {"text": "a"}), "Error: there is no tool 'async_eco'; the tools are slow_echo, async_echo, "
         "fail, leave, hang, megabyte, broken_bytes; did you mean", "unknown_calls"),
        (Call("async_echo", {"text": 3}), "Error: argument 'text': expected string, got 3", "failed_calls"),
        (Call("async_echo", {}), "Error: argument 'text' is missing", "failed_calls"),
        (Call("megabyte", {}), "mmm", "cut_answers"),
        (Call("broken_bytes", {}), "ok \ufffd\ufffd", "mended_answers"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_text_and_a_figure(environment, call, text, figure):
    reply = environment.step(said("", call))
    (message,) = reply.messages
    assert message.get("name") == (call.name if figure != "unknown_calls" else None)
    assert message["content"].startswith(text[:190]) and len(message["content"]) <= 200
    assert not reply.done and reply.reward == 0.0
    counted = {name: value for name, value in reply.figures.items() if value and name != "tool_seconds"}
    assert counted == {"calls": 1, figure: 1}
    assert environment.step(said("", Call("async_echo", {"text": "go on"}))).messages[0]["content"] == "go on"


def test_calls_beyond_the_limit_and_malformed_ones_are_answered_and_counted(environment):
    echo = Call("async_echo", {"text": "a"})
    reply = environment.step(said("", *[echo] * 6, problems=("the tool call could not be read: x",) * 50))
    texts = [message["content"] for message in reply.messages]
    assert texts[:4] == ["a"] * 4 and len(set(texts[4:6])) == 1 and "may have at most 4 calls" in texts[4]
    assert texts[6:] == ["Error: the tool call could not be read: x"] * 4
    assert (reply.figures["refused_calls"], reply.figures["malformed_calls"], reply.figures["calls"]) == (2, 50, 6)
    assert [message.get("name") for message in reply.messages] == ["async_echo"] * 6 + [None] * 4


MAKES_LEVELS = """
import os
for number in range(1500):
    os.mkdir("a")
    open("file", "w").close()
    os.chdir("a")
os.mkdir("closed", 0)
os.chmod("..", 0o500)
"""


def test_thousands_of_levels_are_removed(tmp_path):
    folder = tmp_path / "deep"
    folder.mkdir()
    subprocess.run([sys.executable, "-c", MAKES_LEVELS], cwd=folder, check=True)
    remove_tree(folder)
    assert not folder.exists()


def test_links_are_removed_and_what_they_name_stays(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("stays")
    kept.chmod(0o500)
    for place in ("a", "a/b"):
        (tmp_path / "gone" / place).mkdir(parents=True)
        (tmp_path / "gone" / place / "link").symlink_to(kept)
    (tmp_path / "gone" / "itself").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "gone" / "fifo")
    remove_tree(tmp_path / "gone")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and (kept / "file").read_text() == "stays"
    assert kept.stat().st_mode & 0o777 == 0o500


def test_a_folder_that_is_gone_already_and_a_link_in_its_place(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    for name in ("link", "gone"):
        remove_tree(tmp_path / name)
    assert (tmp_path / "kept" / "file").exists() and (tmp_path / "link").is_symlink()
