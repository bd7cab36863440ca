"""Calls with a limit of time, whatever the function does, and answers as bounded text."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time

import pytest

from threestep.plugins.environments.calling import calls
from threestep.plugins.environments.calling.calls import Caller, Outcome, as_text, bounded
from training.utils.base.errors import ThreestepError


@pytest.fixture
def caller():
    made = Caller()
    yield made
    made.close()


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


def test_long_answers_keep_both_ends_within_the_limit():
    text, was_cut, was_mended = bounded("a" * 500_000 + "b" * 500_000, 200)
    assert len(text) <= 200 and was_cut and not was_mended
    assert text.startswith("aaaa") and text.endswith("bbbb") and "cut: all 1,000,000 characters" in text
    assert bounded("a" * 200, 200) == ("a" * 200, False, False)
    for limit in range(1, 120):
        assert len(bounded("x" * 10_000, limit).text) <= limit


def test_what_cannot_be_encoded_is_mended_and_said():
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
    with pytest.raises(ThreestepError, match=r"limits time by signals \(signal.signal\), which only the main thread"):
        outcome_of(caller, call)
