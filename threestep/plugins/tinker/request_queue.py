"""The requests of all training clients: numbered by the client, done in that order, answered by number.

Requests come out of order, and again: they are sorted, gaps are waited for, and a number that was answered has the same
answer. Knows no model.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from threestep.plugins.tinker.records import ForwardOrder, Order, UnknownRequest, WrongRequest
from threestep.plugins.tinker.store import ClientFolder, StoredMessage
from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from threestep.plugins.tinker.adapters import WeightLayout
    from threestep.plugins.tinker.client_state import ClientState
    from threestep.plugins.tinker.records import LoraSpec

GAP_SECONDS = 600.0  # the client sends a request again for 300
MOST_RESIDENT = 32  # clients without work whose weights stay in memory
_MOST_AHEAD = 100_000  # requests of a client before the next one to do
_MOST_REQUESTS_KEPT = 64  # on disk, until the state is written although no request asks for that
USER, SERVER = "user", "server"  # whose fault an error is


@dataclass(eq=False)
class Job:
    """A request. order: None where it could not be read, which `problem` tells. is_answered: before the server
    started; of it the gradient alone is missing."""

    seq: int
    order: Order | None
    problem: str = ""
    is_answered: bool = False
    arrived: float = field(default_factory=time.monotonic)
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class TrainingClient:
    """A client whose state is in memory. next_seq: the request that is done next. kept: requests on disk that the
    written state does not contain."""

    files: ClientFolder
    spec: LoraSpec
    layout: WeightLayout
    state: ClientState
    next_seq: int
    jobs: dict[int, Job] = field(default_factory=dict)
    kept: int = 0
    used: float = field(default_factory=time.monotonic)

    def ready(self) -> list[Job]:
        """Return what can be done now: forwards that follow one another, or one request of another kind."""
        found, seq = list[Job](), self.next_seq
        while (job := self.jobs.get(seq)) is not None:
            is_forward = isinstance(job.order, ForwardOrder)
            if found and not is_forward:
                break
            found.append(job)
            if not is_forward:
                break
            seq += 1
        return found


class Desk:
    """Takes requests, from many threads, and hands them to the one that computes."""

    def __init__(
        self,
        find: Callable[[str], ClientFolder],
        layout_of: Callable[[LoraSpec], WeightLayout],
        read: Callable[[StoredMessage], Order],
    ) -> None:
        """find: the folder of a client by its id, WrongRequest for what is no id. read: a stored request."""
        self._find, self._layout_of, self._read = find, layout_of, read
        self._clients: dict[str, TrainingClient] = {}
        self.changed = threading.Condition(threading.RLock())
        self.arrivals = 0

    def client(self, model_id: str) -> TrainingClient:
        """Return a client, opened from its files if need be. UnknownRequest if there is none."""
        with self.changed:
            client = self._clients.get(model_id)
            if client is None:
                client = self._clients[model_id] = self._opened(model_id)
                self._make_room()
            client.used = time.monotonic()
            return client

    def _opened(self, model_id: str) -> TrainingClient:
        files = self._find(model_id)
        if not files.exists:
            raise UnknownRequest(f"there is no training client '{model_id:.100}' on this server; create it first")
        try:
            return self._read_from(files)
        except ThreestepError as problem:
            raise ThreestepError(f"{problem}; create a client from a saved state instead of this one") from problem

    def _read_from(self, files: ClientFolder) -> TrainingClient:
        spec = files.spec()
        layout = self._layout_of(spec)
        state, seq, answer = files.read_state(layout)
        if answer is not None and files.result(seq) is None:
            files.write_result(seq, json_message(answer))
        client = TrainingClient(files, spec, layout, state, seq + 1)
        for number, message in files.requests().items():
            if number > seq:
                client.jobs[number] = self._again(client, number, message)
        client.kept = len(client.jobs)
        return client

    def _again(self, client: TrainingClient, number: int, message: StoredMessage) -> Job:
        known = client.files.result(number)
        if known is not None and not known.is_proto:  # it failed, or changed nothing: a change is in the state
            job = Job(number, None, is_answered=True)
        else:
            job = self._job(number, message)
            job.is_answered = known is not None
        if known is not None:
            job.done.set()
        return job

    def _job(self, number: int, message: StoredMessage) -> Job:
        try:
            return Job(number, self._read(message))
        except WrongRequest as mistake:
            return Job(number, None, str(mistake))

    def submit(self, model_id: str, seq: int, message: StoredMessage) -> str:
        """Keep a request, which is done once those before it are; return its id. A number that came before is not done
        again. UnknownRequest without such a client, WrongRequest for a number that cannot be."""
        request_id = f"{model_id}:{seq}"
        job = self._job(seq, message)
        with self.changed:
            client = self.client(model_id)
            if seq < client.next_seq or seq in client.jobs:
                return request_id
            if seq > client.next_seq + _MOST_AHEAD:
                raise WrongRequest(
                    f"seq_id must be {client.next_seq}, the next one, got {seq}; number requests in order"
                )
            client.files.write_request(seq, message)
            client.jobs[seq] = job
            client.kept += 1
        self.wake()
        return request_id

    def wake(self) -> None:
        """Tell the thread that computes that something is there."""
        with self.changed:
            self.arrivals += 1
            self.changed.notify_all()

    def sleep(self, arrivals: int, seconds: float) -> None:
        """Wait until there are more than so many arrivals, for so long at most."""
        with self.changed:
            self.changed.wait_for(lambda: self.arrivals != arrivals, seconds)

    def wait(self, model_id: str, seq: int, seconds: float) -> StoredMessage | None:
        """Return the answer to a request, waiting for so long at most; None where it is not done by then.
        UnknownRequest where there is none, and no request that waits."""
        with self.changed:
            client = self.client(model_id)
            job = client.jobs.get(seq)
        if job is not None and not job.done.wait(seconds):
            return None
        found = client.files.result(seq)
        if found is None:
            raise UnknownRequest(f"request {seq} of '{model_id:.100}' is neither waiting nor answered")
        return found

    def ready(self) -> list[tuple[TrainingClient, list[Job]]]:
        """Return the clients with something to do, and what."""
        with self.changed:
            found = ((client, client.ready()) for client in self._clients.values())
            return [(client, jobs) for client, jobs in found if jobs]

    def finish(self, client: TrainingClient, job: Job, answer: StoredMessage, has_new_weights: bool = False) -> None:
        """Write the state, if the request changed the weights, and the answer; then tell whoever waits. The request is
        the client's next one. If the disk refuses, the client is forgotten, and comes back from its files."""
        try:
            self._write(client, job, answer, has_new_weights)
        except BaseException:
            with self.changed:
                self._clients = {name: each for name, each in self._clients.items() if each is not client}
            raise
        with self.changed:
            client.next_seq = job.seq + 1
            del client.jobs[job.seq]
        job.done.set()

    def _write(self, client: TrainingClient, job: Job, answer: StoredMessage, has_new_weights: bool) -> None:
        if has_new_weights:
            client.files.write_state(client.state, job.seq, json.loads(answer.body))
            client.kept = 0
        if not job.is_answered:
            client.files.write_result(job.seq, answer)
        if client.kept > _MOST_REQUESTS_KEPT:
            self._keep(client, job.seq)

    def fail_gaps(self) -> None:
        """Fail requests that wait for one that never came."""
        now = time.monotonic()
        with self.changed:
            clients = list(self._clients.values())
        for client in clients:
            late = sorted(seq for seq, job in client.jobs.items() if now - job.arrived > GAP_SECONDS)
            if not late or client.next_seq in client.jobs:
                continue
            sentence = f"request {client.next_seq} of this client never arrived, so the requests after it were not run"
            for seq in range(client.next_seq, late[-1] + 1):
                with self.changed:
                    job = client.jobs.setdefault(seq, Job(seq, None))
                self.finish(client, job, json_message(error_answer(sentence, USER)))
            self._keep(client, client.next_seq - 1)

    def _keep(self, client: TrainingClient, seq: int) -> None:
        client.files.write_state(client.state, seq)
        client.kept = len([number for number in client.jobs if number > seq])

    def _make_room(self) -> None:
        """Write and forget the clients that were used least, beyond MOST_RESIDENT."""
        idle = sorted((client.used, model_id) for model_id, client in self._clients.items() if not client.jobs)
        most = 1 if any(not client.layout.shares_rows for client in self._clients.values()) else MOST_RESIDENT
        for _, model_id in idle[: max(0, len(self._clients) - most)]:
            client = self._clients.pop(model_id)
            if client.state.gradient_P is not None:
                self._keep(client, client.next_seq - 1)


def json_message(answer: Mapping[str, Any]) -> StoredMessage:
    """An answer in JSON."""
    return StoredMessage(json.dumps(dict(answer)).encode(), is_proto=False)


def error_answer(sentence: str, category: str) -> dict[str, str]:
    """The answer to a request that failed. category: USER or SERVER."""
    return {"error": sentence, "category": category}
