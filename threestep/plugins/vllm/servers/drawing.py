"""Draws turns on servers: each on its own, and elsewhere, with the same seed, where that one fails.

A response depends on its tokens, its seed and the weights, not on the server: who draws what decides nothing but how
much of a prompt is computed again.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from threestep.plugins.vllm.servers.client import ServerClient, ServerFailure
from threestep.plugins.vllm.servers.experts import taken_experts
from threestep.plugins.vllm.servers.protocol import EXPERTS_OF
from threestep.plugins.vllm.servers.requests import GENERATE, RequestSettings, request_of, turn_of
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rollout_engine import ServerShare, joined_shares

if TYPE_CHECKING:
    from training.utils.contracts.drawing import DrawnTurn, NextTurn

_TRIES = 3
_PAUSE_SECONDS = 0.5  # before the second try, and twice as long before the third
_MOST_AT_ONCE = 512  # requests of a rank; servers batch what they have room for


class FailedServer(NamedTuple):
    """A server that failed, and why. is_passing: it may be another one when it is back."""

    address: str
    reason: str
    is_passing: bool


class SharesOfThreads:
    """The shares of servers, for each thread that asks for turns by itself."""

    def __init__(self) -> None:
        self._local = threading.local()

    def add(self, parts: Iterable[dict[str, ServerShare]]) -> None:
        self._local.shares = joined_shares([self._own, *parts])

    def take(self) -> dict[str, ServerShare]:
        """Return this thread's since the last call."""
        taken, self._local.shares = self._own, {}
        return taken

    @property
    def _own(self) -> dict[str, ServerShare]:
        return getattr(self._local, "shares", {})


class _Drawn(NamedTuple):
    """A turn, and what servers needed for it: that which drew it, and those that failed before."""

    turn: DrawnTurn
    shares: dict[str, ServerShare]


class ServerDrawing:
    """Servers that have the same weights.

    left_out: those that failed since, by address.
    """

    def __init__(
        self, clients: Sequence[ServerClient], seconds: float, log: Callable[[str], None], shares: SharesOfThreads
    ) -> None:
        """seconds: for a response. log: takes a sentence. shares: gets what each server draws."""
        self._clients, self._seconds, self._log, self._shares = list(clients), seconds, log, shares
        self._lock = threading.Lock()
        self.left_out: dict[str, FailedServer] = {}

    def draw(self, turns: Sequence[NextTurn], homes: Sequence[int], asked: RequestSettings) -> list[DrawnTurn]:
        """Return the turns, in their order. homes: equal numbers are drawn by one server."""
        if not turns:
            return []
        drawn = _side_by_side(lambda place: self._drawn(turns[place], homes[place], asked), len(turns))
        if asked.stop is not None:
            self._check_versions(asked)
        self._shares.add(each.shares for each in drawn)
        return [each.turn for each in drawn]

    def _drawn(self, turn: NextTurn, home: int, asked: RequestSettings) -> _Drawn:
        shares: dict[str, ServerShare] = {}
        for client in self._from(home):
            started, drawn = time.monotonic(), None
            try:
                drawn = self._by(client, turn, asked)
            except ServerFailure as problem:
                self._leave_out(FailedServer(client.address, str(problem), problem.is_passing))
            seconds = time.monotonic() - started
            shares[client.address] = ServerShare(int(drawn is not None), seconds, seconds)
            if drawn is not None:
                return _Drawn(drawn, shares)
        raise ThreestepError(no_server({each.address: each.reason for each in self.left_out.values()}))

    def _from(self, home: int) -> Iterator[ServerClient]:
        """Yield the servers that are there, one's own first."""
        count = len(self._clients)
        for step in range(count):
            client = self._clients[(home + step) % count]
            if client.address not in self.left_out:
                yield client

    def _by(self, client: ServerClient, turn: NextTurn, asked: RequestSettings) -> DrawnTurn:
        """Return what a server draws, after some tries."""
        for count in range(1, _TRIES + 1):
            try:
                return self._once(client, turn, asked)
            except ServerFailure as problem:
                if count == _TRIES or not problem.is_passing or client.address in self.left_out:
                    raise
                time.sleep(count * _PAUSE_SECONDS)
        raise AssertionError

    def _once(self, client: ServerClient, turn: NextTurn, asked: RequestSettings) -> DrawnTurn:
        if not asked.experts:
            return self._answered(client, turn, asked, request_of(turn, asked))
        name = EXPERTS_OF + secrets.token_hex(8)
        drawn = self._answered(client, turn, asked, request_of(turn, asked, name))
        read = len(turn.ids) + len(drawn.ids) - 1
        return replace(drawn, experts_TLK=taken_experts(client, name, read, self._seconds))

    def _answered(
        self, client: ServerClient, turn: NextTurn, asked: RequestSettings, body: dict[str, Any]
    ) -> DrawnTurn:
        if asked.stop is None:
            return turn_of(turn, asked, [client.post(GENERATE, body, self._seconds)])
        events = client.events(GENERATE, body, self._seconds)
        try:
            return turn_of(turn, asked, _until(events, time.monotonic() + self._seconds, self._seconds))
        finally:
            events.close()  # type: ignore[attr-defined]  # a generator's: ends the request at the server

    def _leave_out(self, left: FailedServer) -> None:
        with self._lock:
            if left.address in self.left_out:
                return
            self.left_out[left.address] = left
        self._log(
            f"warning: rollout server {left.address} dropped ({left.reason}); other servers generate its responses"
        )

    def _check_versions(self, asked: RequestSettings) -> None:
        """Responses that were cut before their end did not say by which weights they were drawn."""
        for client in self._clients:
            if client.address in self.left_out:
                continue
            try:
                version = weights_of(client, self._seconds)
            except ServerFailure:
                continue  # it answered what was asked
            if version != asked.version:
                raise ThreestepError(
                    f"the weights of rollout server {client.address} changed while it was generating; use each "
                    "server for only one run"
                )


def _side_by_side(draw: Callable[[int], _Drawn], count: int) -> list[_Drawn]:
    """Return what `draw` returns for each number below `count`, many at once; raise what it raises, without waiting for
    the others, in threads that do not keep the program alive."""
    numbers = iter(range(count))
    over: queue.SimpleQueue[tuple[int, _Drawn | BaseException]] = queue.SimpleQueue()
    drawn: dict[int, _Drawn] = {}
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                over.put((number, draw(number)))
            except BaseException as problem:  # noqa: BLE001 - raised below
                over.put((number, problem))

    for _ in range(min(count, _MOST_AT_ONCE)):
        threading.Thread(target=run, name="rollout server", daemon=True).start()
    while len(drawn) < count:
        number, found = over.get()
        if isinstance(found, BaseException):
            with lock:
                for _ in numbers:  # nobody begins another
                    pass
            raise found
        drawn[number] = found
    return [drawn[number] for number in range(count)]


def weights_of(client: ServerClient, seconds: float) -> Any:
    """Return the version of the weights by which a server draws."""
    answer = client.get("/weight_info", seconds)
    return answer.get("weight_version") if isinstance(answer, dict) else None


def no_server(reasons: dict[str, str]) -> str:
    """The mistake of a run without servers."""
    found = "; ".join(f"{address}: {reason}" for address, reason in reasons.items())
    return (
        f"no rollout server in --vllm_servers is left ({found}); start one with scripts/serve.sh, and resume the "
        "run with --resume"
    )


def _until(events: Iterator[Any], end: float, seconds: float) -> Iterator[Any]:
    for event in events:
        if time.monotonic() > end:
            raise ServerFailure(f"no complete answer within {seconds:g} seconds")
        yield event
