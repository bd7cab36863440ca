"""Questions to a service: several at a time, each asked again until it is answered or given up, within a budget."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from threestep.plugins.judges.verdicts import AskedQuestion, Spent, Verdict, Verdicts
from threestep.plugins.serving.asking.failures import LONGEST_PAUSE_SECONDS, FailedRequest, cut_fault, not_within
from training.utils.base.errors import ThreestepError
from training.utils.rewards.table import RunPlace

if TYPE_CHECKING:
    from threestep.plugins.serving.asking.settings import AskSettings

_LONGEST_ASKED_PAUSE_SECONDS = 60.0
# Sends questions in one request, and returns a reply to each.
Send = Callable[[Sequence[AskedQuestion]], Sequence[Verdict]]


@dataclass
class _Budget:
    """The requests and tokens that this rank may still spend. None: without bound."""

    requests: int | None
    tokens: int | None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take_request(self, name: str, settings: AskSettings) -> None:
        """Count a request that is about to be sent; FailedRequest if there is none left."""
        with self.lock:
            for left, most, what in (
                (self.requests, settings.most_requests, "requests"),
                (self.tokens, settings.most_tokens, "tokens"),
            ):
                if left is not None and left <= 0:
                    raise FailedRequest(
                        f"the budget of {most:,} {what} is used up (most_{what} of '{name}', shared by the ranks); "
                        "raise it and resume the run, which keeps the verdicts so far",
                        is_final=True,
                    )
            if self.requests is not None:
                self.requests -= 1

    def spend_tokens(self, tokens: int) -> None:
        with self.lock:
            if self.tokens is not None:
                self.tokens -= tokens


class AskedService:
    """A service by its name in the log. per_request: questions of one request."""

    def __init__(self, name: str, settings: AskSettings, per_request: int = 1) -> None:
        self.name, self._settings, self._per_request = name, settings, per_request
        self._batches = threading.Lock()
        self.open(RunPlace())

    def open(self, place: RunPlace) -> None:
        """Read what the run in `place` has asked before, and write there from now on."""
        folder = None if place.folder is None else place.folder / "verdicts"
        self._verdicts = Verdicts(self.name, folder, place.rank, place.replay)
        spent, settings = self._verdicts.spent_before, self._settings

        def share(most: int | None, spent: int) -> int | None:
            if most is None:
                return None
            return max(most - spent, 0) // place.world_size + (place.rank < max(most - spent, 0) % place.world_size)

        self._budget = _Budget(share(settings.most_requests, spent.requests), share(settings.most_tokens, spent.tokens))

    @property
    def replays(self) -> bool:
        return self._verdicts.replays is not None

    def values(self, questions: Sequence[AskedQuestion], send: Send) -> list[float]:
        """Return a number for each question; ask those that are new, equal ones once. ThreestepError as soon as one is
        given up: a failure has no number."""
        with self._batches:  # a question of two batches is asked once
            keys = [question.key for question in questions]
            new = {key: question for key, question in zip(keys, questions, strict=True) if key not in self._verdicts}
            if new and self.replays:
                raise ThreestepError(
                    f"--reward_replay {self._verdicts.replays} has no verdict from the reward '{self.name}' for "
                    f"{next(iter(new.values())).shown}; this run differs from the recorded one: use the same flags, "
                    "data, seed, reward settings and number of ranks"
                )
            if new:
                self._ask(list(new.values()), send)
            return [self._verdicts.value(key) for key in keys]

    def _ask(self, questions: Sequence[AskedQuestion], send: Send) -> None:
        size = self._per_request
        waiting = [questions[first : first + size] for first in range(0, len(questions), size)][::-1]
        problems: list[str] = []
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    if problems or not waiting:
                        return
                    own = waiting.pop()
                try:
                    self._answer(own, send, lambda: bool(problems))
                except FailedRequest as failure:
                    with lock:
                        problems.append(f"the reward '{self.name}' has no verdict on {own[0].shown}: {failure}")

        workers = [
            threading.Thread(target=work, name=f"asking {self.name}", daemon=True)
            for _ in range(min(self._settings.concurrency, len(waiting)))
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if problems:
            raise ThreestepError(problems[0])

    def _answer(self, questions: Sequence[AskedQuestion], send: Send, is_given_up: Callable[[], bool]) -> None:
        """Ask until there is an answer, and keep it. FailedRequest for the last failure."""
        started, pause, spent = time.monotonic(), self._settings.pause, Spent()
        for attempt in range(self._settings.retries + 1):
            try:
                self._budget.take_request(self.name, self._settings)
                spent = Spent(spent.requests + 1, spent.tokens)
                replies = _within(self._settings.seconds, send, questions)
                break
            except FailedRequest as failure:
                self._budget.spend_tokens(failure.tokens)
                spent = Spent(spent.requests, spent.tokens + failure.tokens)
                if failure.is_final or attempt == self._settings.retries or is_given_up():
                    for place, question in enumerate(questions):
                        self._verdicts.add_failure(question, str(failure), Spent() if place else spent)
                    times = f" (after {spent.requests} requests)" if spent.requests > 1 else ""
                    raise FailedRequest(f"{failure}{times}", is_final=True) from failure
                time.sleep(max(pause, min(failure.after or 0.0, _LONGEST_ASKED_PAUSE_SECONDS)))
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        self._budget.spend_tokens(sum(reply.tokens for reply in replies))
        for place, (question, reply) in enumerate(zip(questions, replies, strict=True)):
            # Requests, and what failed ones charged, are the first one's, so that the log adds up.
            own = reply if place else reply._replace(tokens=reply.tokens + spent.tokens)
            self._verdicts.add(question, own, 0 if place else spent.requests, time.monotonic() - started)


def _within(seconds: float, send: Send, questions: Sequence[AskedQuestion]) -> Sequence[Verdict]:
    """Call `send`; FailedRequest after so many seconds, however slowly bytes arrive."""
    answer: Future[Sequence[Verdict]] = Future()

    def work() -> None:
        try:
            answer.set_result(send(questions))
        except BaseException as problem:  # noqa: BLE001 - whatever it is, it is the caller's
            answer.set_exception(problem)

    threading.Thread(target=work, name="a request", daemon=True).start()
    try:
        return answer.result(seconds)
    except FutureTimeout:  # here, or of a socket
        raise not_within(seconds) from None
    except (FailedRequest, ThreestepError):
        raise
    except Exception as problem:
        raise FailedRequest(f"{type(problem).__name__}: {cut_fault(str(problem))}") from problem
