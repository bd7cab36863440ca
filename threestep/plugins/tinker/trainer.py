"""Turns of the thread that computes: optimizer steps, saves and loads one by one, forwards of all clients together."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from threestep.plugins.tinker.client_state import ClientState
from threestep.plugins.tinker.forward import ForwardJob, Forwards
from threestep.plugins.tinker.records import AdamOrder, ForwardOrder, ForwardResult, LoadOrder, SaveOrder, WrongRequest
from threestep.plugins.tinker.request_queue import SERVER, USER, Desk, Job, TrainingClient, error_answer, json_message
from threestep.plugins.tinker.store import Store, StoredMessage, load_checkpoint
from training.utils.base.console import note
from training.utils.base.errors import ThreestepError
from training.utils.base.machine import is_out_of_memory

if TYPE_CHECKING:
    import torch

_LONGEST_GATHERING = 0.25  # seconds that a forward waits for the clients of the last one
_Work = list[tuple[TrainingClient, Job]]


class Trainer:
    """Does what the desk has. move: a loaded tensor to where the model computes."""

    def __init__(
        self,
        desk: Desk,
        forwards: Forwards,
        store: Store,
        *,
        base: str,
        written: Callable[[ForwardResult], bytes],
        open_sampler: Callable[[str, int, str], str],
        move: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """written: a result as protobuf. open_sampler: a sampling session, of session, number and weights."""
        self._desk, self._forwards, self._store, self._base = desk, forwards, store, base
        self._written, self._open_sampler, self._move = written, open_sampler, move
        self._last: set[TrainingClient] = set()
        self._last_seconds = 0.0
        self._gathering_since: float | None = None

    @property
    def is_gathering(self) -> bool:
        """True while forwards wait for more of them."""
        return self._gathering_since is not None

    def turn(self) -> bool:
        """Do what is ready; True if that was something. Forwards wait a little for the clients of the last ones, so
        that these share micro-batches again."""
        did_some = False
        while lone := [(client, jobs[0]) for client, jobs in self._desk.ready() if _is_alone(jobs[0])]:
            for client, job in lone:
                self._alone(client, job)
            did_some = True
        work = [(client, job) for client, jobs in self._desk.ready() for job in jobs]
        if not work:
            return did_some
        present, now = {client for client, _ in work}, time.monotonic()
        since = self._gathering_since = self._gathering_since or now
        if not self._last <= present and now - since < min(self._last_seconds, _LONGEST_GATHERING):
            return did_some
        self._gathering_since, self._last = None, present
        self._together(work)
        self._last_seconds = time.monotonic() - now
        return True

    def _alone(self, client: TrainingClient, job: Job) -> None:
        order = job.order
        has_new_weights = isinstance(order, (AdamOrder, LoadOrder))
        answer: Mapping[str, object]
        try:
            if order is None:
                raise WrongRequest(job.problem)
            answer = self._done(client, job.seq, order) if not job.is_answered else {}
        except WrongRequest as mistake:
            answer = error_answer(str(mistake), USER)
        except ThreestepError as problem:  # of a damaged file
            note(f"error: {problem}")
            answer = error_answer(str(problem), SERVER)
        except Exception as problem:  # noqa: BLE001 - the server outlives whatever a client's state raises
            answer = error_answer(_failure(problem), SERVER)
        self._desk.finish(client, job, json_message(answer), has_new_weights)

    def _done(self, client: TrainingClient, seq: int, order: object) -> dict[str, object]:
        if isinstance(order, AdamOrder):
            return {"metrics": client.state.step(order)}
        if isinstance(order, LoadOrder):
            return self._load(client, order)
        assert isinstance(order, SaveOrder)
        if not order.for_sampling:
            assert order.name is not None
            path = client.files.save_checkpoint(order.name, client.state, seq, order.overwrite)
            return {"type": "save_weights", "path": path}
        path = client.files.save_weights(order.name, client.state.weights_P, client.layout, seq=seq, base=self._base)
        answer: dict[str, object] = {"type": "save_weights_for_sampler", "path": path}
        if order.session_number is not None:
            session = client.files.model_id.partition(":")[0]
            answer["sampling_session_id"] = self._open_sampler(session, order.session_number, path)
        return answer

    def _load(self, client: TrainingClient, order: LoadOrder) -> dict[str, object]:
        folder, spec = self._store.checkpoint(order.path)
        if spec.shape != client.spec.shape:
            raise WrongRequest(
                f"'{order.path}' has adapters of rank {spec.rank} on {', '.join(spec.parts)}, but this client has "
                f"rank {client.spec.rank} on {', '.join(client.spec.parts)}; create a client from that state "
                "instead"
            )
        client.state = loaded_state(load_checkpoint(folder, client.layout), order.with_optimizer, self._move)
        return {"type": "load_weights", "path": order.path, "model_id": client.files.model_id}

    def _together(self, work: _Work) -> None:
        found: dict[Job, ForwardJob] = {}
        failed: dict[Job, str] = {}
        groups: dict[tuple[object, ...], _Work] = {}
        for client, job in work:
            order = job.order
            assert isinstance(order, ForwardOrder)
            if job.is_answered and not order.has_backward:
                continue
            groups.setdefault((client.spec.shape, order.has_backward), []).append((client, job))
            found[job] = ForwardJob(order, client.state.weights_P)
        for group in groups.values():
            self._forward(group, found, failed)
        for client, job in work:
            if job in failed:
                self._desk.finish(client, job, json_message(error_answer(failed[job], SERVER)))
                continue
            done = found.get(job)
            if done is not None and done.gradient_P is not None:
                client.state.add(done.gradient_P)
            answer = StoredMessage(b"" if job.is_answered or done is None else self._written(done.result), True)
            self._desk.finish(client, job, answer)

    def _forward(self, group: _Work, found: dict[Job, ForwardJob], failed: dict[Job, str]) -> None:
        """Compute the jobs of a group together; where that fails, each alone, so that one does not fail the others."""
        jobs, layout = [found[job] for _, job in group], group[0][0].layout
        try:
            self._forwards.run(jobs, layout, jobs[0].order.has_backward)
        except Exception as problem:  # noqa: BLE001 - the server outlives whatever a forward raises
            if len(group) == 1:
                failed[group[0][1]] = _failure(problem)
                return
            for client, job in group:
                found[job] = replace(found[job], loss=0.0, logprobs={}, gradient_P=None)
                self._forward([(client, job)], found, failed)


def loaded_state(state: ClientState, with_optimizer: bool, move: Callable[[torch.Tensor], torch.Tensor]) -> ClientState:
    """Return the state of a checkpoint as a client goes on with it."""
    weights_P = move(state.weights_P)
    if not with_optimizer:
        return ClientState.new(weights_P)
    return ClientState(weights_P, move(state.first_P), move(state.second_P), None, state.steps)


def _is_alone(job: Job) -> bool:
    return not isinstance(job.order, ForwardOrder)


def _failure(problem: Exception) -> str:
    if is_out_of_memory(problem):
        return (
            "out of memory; send fewer or shorter datums, or start the server with a lower --max_tokens_per_micro_batch"
        )
    traceback.print_exception(problem)
    return "the server failed; see its log"
