"""Calls of a user's functions, async or not, with a limit of time; and their results as text of a bounded length.

Every call runs in a separate thread that does not keep the program alive, so a call that never returns costs a thread
and nothing else. Async functions run in one event loop, which is abandoned if a function blocks it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, NamedTuple

from training.utils.base.alarms import alarms_noted
from training.utils.base.errors import ThreestepError

MOST_HANGING = 64  # calls that have not returned in time; with as many, further calls fail
_LOOP_SECONDS = 1.0  # in which an event loop that is not blocked answers


@dataclass(frozen=True)
class Outcome:
    """The result of a call: a value, the exception that it raised, or neither in time."""

    value: Any = None
    problem: BaseException | None = None
    is_slow: bool = False


class RunningCall:
    """A call in a separate thread."""

    def __init__(self, call: Callable[[], Any], finish: Callable[[Any], Any], loop: UserLoop) -> None:
        """call: returns a value or an awaitable. finish: makes the outcome's value of it."""
        self._call = call
        self._finish = finish
        self._loop = loop
        self._awaited: Future[Outcome] | None = None
        self._outcome: Future[Outcome] = Future()
        self.was_refused_alarm = False
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="call of a user's function", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as problem:  # no thread is left
            self._outcome.set_result(Outcome(problem=problem))

    @property
    def hangs(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        # Outcomes are never set as exceptions: a future treats some of them, such as StopIteration, specially.
        with alarms_noted() as alarms:
            try:
                value = self._call()
                outcome = Outcome(value)
                if inspect.isawaitable(value):
                    self._awaited = self._loop.start(value)
                    outcome = self._awaited.result()
                if outcome.problem is None:
                    outcome = Outcome(self._finish(outcome.value))
            except BaseException as problem:  # noqa: BLE001 - also SystemExit, which would end this thread silently
                outcome = Outcome(problem=problem)
        self.was_refused_alarm = alarms.any
        self._outcome.set_result(outcome)

    def wait(self, seconds: float | None) -> Outcome:
        """Wait until `seconds` after the start at most; without a limit for None."""
        left = None if seconds is None else max(self._started + seconds - time.monotonic(), 0.0)
        try:
            return self._outcome.result(left)
        except FutureTimeout:
            if self._awaited is not None:
                self._awaited.cancel()
                self._loop.check()
            return Outcome(is_slow=True)


class UserLoop:
    """The event loop of a user's async functions, in a separate thread that starts with the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._blocked: list[threading.Thread] = []

    def start(self, value: Awaitable[Any]) -> Future[Outcome]:
        """Begin to await a value."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._loop.set_default_executor(DaemonThreads())
                self._thread = threading.Thread(target=_run_loop, args=(self._loop,), name="users' loop", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(_outcome_of(value), self._loop)

    def check(self) -> None:
        """Leave the loop to itself if a function blocks it: the next call gets another one."""
        with self._lock:
            answered = threading.Event()
            if self._loop is None or self._thread is None:
                return
            self._loop.call_soon_threadsafe(answered.set)
            if not answered.wait(_LOOP_SECONDS):
                self._blocked.append(self._thread)
                self._stop()

    def blocked(self) -> int:
        """Number of loops that are still blocked."""
        with self._lock:
            self._blocked = [thread for thread in self._blocked if thread.is_alive()]
            return len(self._blocked)

    def close(self) -> None:
        """Stop the loop; what runs in it is cancelled, and has a second to end."""
        with self._lock:
            thread = self._thread
            self._stop()
        if thread is not None:
            thread.join(_LOOP_SECONDS)

    def _stop(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


class DaemonThreads(ThreadPoolExecutor):
    """A thread for each job, as `asyncio.to_thread` starts them; Python would wait for a pool's threads at its end."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        answer: Future[Any] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(fn(*args, **kwargs))
            except BaseException as problem:  # noqa: BLE001 - as the pool's threads
                answer.set_exception(problem)

        threading.Thread(target=run, name="a job of a user's async function", daemon=True).start()
        return answer


async def _outcome_of(value: Awaitable[Any]) -> Outcome:
    try:
        return Outcome(await value)
    except BaseException as problem:  # noqa: BLE001 - SystemExit would end the loop
        return Outcome(problem=problem)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left))
    loop.close()


def _as_it_is(value: Any) -> Any:
    return value


def _refuse() -> None:
    raise RuntimeError(f"not called: {MOST_HANGING} earlier calls have not returned")


class Caller:
    """Starts calls, and counts those that have not returned in time."""

    def __init__(self) -> None:
        self._loop = UserLoop()
        self._lock = threading.Lock()
        self._late: list[RunningCall] = []

    def start(self, call: Callable[[], Any], finish: Callable[[Any], Any] = _as_it_is) -> RunningCall:
        """Start a call (see `RunningCall`); its outcome is an error where too many earlier ones still run."""
        with self._lock:
            self._late = [late for late in self._late if late.hangs]
            if len(self._late) + self._loop.blocked() >= MOST_HANGING:
                return RunningCall(_refuse, finish, self._loop)
        return RunningCall(call, finish, self._loop)

    def wait(self, running: RunningCall, seconds: float | None) -> Outcome:
        """Return the outcome of a call that was started here, `seconds` after its start at the latest. ThreestepError
        for a call that set an alarm, whatever it made of the refusal: its outcome would be silently wrong."""
        outcome = running.wait(seconds)
        if running.was_refused_alarm:
            raise ThreestepError(
                "a function of an environment sets a time limit with signals (signal.signal), which works only in "
                "the main thread, but conversations run in other threads; turn that limit off (Math-Verify: "
                "parsing_timeout=None, timeout_seconds=None) and let --environment_seconds limit each call, or run "
                "the function in a process"
            )
        if outcome.is_slow:
            with self._lock:
                self._late.append(running)
        return outcome

    def close(self) -> None:
        """Stop the event loop. Calls that hang end with the program."""
        self._loop.close()


class BoundedText(NamedTuple):
    """text: for the model. was_cut: parts in its middle were left out. was_mended: bytes or characters that are no
    UTF-8 were replaced."""

    text: str
    was_cut: bool
    was_mended: bool


def as_text(value: Any) -> str:
    """Return a tool's answer as text: text as it is, bytes as UTF-8 with U+FFFD for invalid ones, nothing for None, and
    JSON of the rest if it has one."""
    if isinstance(value, str):
        return value
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).decode("utf-8", "replace")
    if value is None:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def bounded(text: str, characters: int) -> BoundedText:
    """Return text of at most `characters` characters that can be encoded, with a note in place of a cut middle."""
    was_cut = len(text) > characters
    if was_cut:
        note = f"\n[... cut: the whole text has {len(text):,} characters ...]\n"
        room = max(characters - len(note), 0)
        text = (text[: room - room // 2] + note + text[len(text) - room // 2 :])[:characters]
    mended = text.encode("utf-8", "replace").decode("utf-8")
    return BoundedText(mended, was_cut, mended != text or "\N{REPLACEMENT CHARACTER}" in text)
