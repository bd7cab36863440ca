"""The paths of the Tinker API: sessions, creation of clients, requests that become futures, and their answers."""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from threestep.plugins.serving.refusals import RefusedRequest
from threestep.plugins.tinker.client_state import ClientState
from threestep.plugins.tinker.records import PARTS, LoraSpec, SampleOrder, UnknownRequest, WrongRequest
from threestep.plugins.tinker.request_queue import USER, Desk, error_answer, json_message
from threestep.plugins.tinker.sampling import SampleJob, Sampler, SamplerWeights
from threestep.plugins.tinker.store import (
    ClientFolder,
    Store,
    StoredMessage,
    delete_checkpoint,
    load_checkpoint,
    load_weights,
    run_page,
)
from threestep.plugins.tinker.trainer import loaded_state
from threestep.plugins.tinker.wire import (
    FORWARD,
    LOAD,
    SAVE,
    SAVE_SAMPLER,
    STEP,
    Fields,
    RequestBounds,
    check_optimizer,
    forward_message,
    lora_of,
    read_order,
    sample_answer,
    sample_of,
)
from training.utils.base.console import note
from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    import torch

    from threestep.plugins.tinker.adapters import WeightLayout

HOLD_SECONDS = 20.0  # of a request for an answer that is not there yet; the client waits 45
_MOST_SAMPLERS = 16  # whose weights stay in memory
_KEPT_SAMPLES = 4096  # answers to requests for sequences; one that is gone is asked for anew
_SESSION = re.compile(r"[0-9a-f]{32}")
_CLIENT = re.compile(r"([0-9a-f]{32}):train:([0-9]{1,9})")
_SAMPLER = re.compile(r"([0-9a-f]{32}):sample:([0-9]{1,9})")
_FINISH = re.compile(r"sessions/([0-9a-f]{32})/finish")
_REQUEST = re.compile(r"([0-9a-f]{32}:(train|sample):[0-9]{1,9}):([0-9]{1,18})")
_Answer = TypeVar("_Answer")
_KINDS = {
    "optim_step": STEP,
    "save_weights": SAVE,
    "load_weights": LOAD,
    "save_weights_for_sampler": SAVE_SAMPLER,
}


@dataclass(frozen=True)
class ServedBase:
    """The base model. name: by which clients ask for it. tokenizer: a folder or hub name. most_waiting: sequences that
    wait to be drawn. is_full: clients train all weights, whatever adapters they ask for."""

    name: str
    tokenizer: str
    bounds: RequestBounds
    most_waiting: int
    layout_of: Callable[[LoraSpec], WeightLayout]
    new_weights: Callable[[LoraSpec], torch.Tensor]
    move: Callable[[torch.Tensor], torch.Tensor]
    is_full: bool = False


class TrainingService:
    """Answers requests, from many threads."""

    def __init__(self, base: ServedBase, store: Store, sampler: Sampler) -> None:
        self.base, self._store, self._sampler = base, store, sampler
        self.desk = Desk(self._folder, base.layout_of, lambda message: read_order(message, base.bounds))
        self._lock = threading.Lock()
        self._creating = threading.Lock()
        self._failed: OrderedDict[str, dict[str, str]] = OrderedDict()  # creations, by request id
        self._samples: OrderedDict[str, SampleJob] = OrderedDict()
        self._weights: OrderedDict[tuple[str, int], SamplerWeights] = OrderedDict()
        self._base_weights = SamplerWeights()
        self._posts: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "client/config": lambda given: {},
            "client/dynamic_config": lambda given: {},
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "telemetry": lambda given: {"status": "accepted"},
            "create_model": self._create_model,
            "get_info": self._info,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "cancel_future": self._cancel,
        }

    def check_path(self, path: str) -> None:
        """RefusedRequest for a path that takes no POST of JSON."""
        if path not in _KINDS and path not in self._posts and _FINISH.fullmatch(path) is None:
            raise RefusedRequest(f"this server has no {path:.100}", 404)

    def post(self, path: str, given: Any, body: bytes) -> dict[str, Any]:
        """Answer a POST of JSON, to a path that was checked. RefusedRequest for what is wrong with it."""
        if not isinstance(given, dict):
            raise RefusedRequest("the body must be an object")
        if path in _KINDS and not (path == "load_weights" and given.get("model_id") is None):
            return self._submit(
                str(given.get("model_id")), given.get("seq_id"), StoredMessage(body, False, _KINDS[path])
            )
        if (found := _FINISH.fullmatch(path)) is not None:
            self._store.open_session(self._check_session(found[1]), {"finished": time.time(), **given})
            return {}
        answer = self._create_from_state if path == "load_weights" else self._posts[path]
        return self._told(lambda: answer(given))

    @staticmethod
    def _told(work: Callable[[], _Answer]) -> _Answer:
        """Return what `work` returns; RefusedRequest for a mistake, and for a damaged file of this server."""
        try:
            return work()
        except RefusedRequest:
            raise
        except UnknownRequest as problem:
            raise RefusedRequest(str(problem), 404) from problem
        except WrongRequest as problem:
            raise RefusedRequest(str(problem)) from problem
        except ThreestepError as problem:
            note(f"error: {problem}")
            raise RefusedRequest(str(problem), 500) from problem

    def get(self, path: str) -> dict[str, Any]:
        """Answer a GET. RefusedRequest for an unknown path."""
        if path == "healthz":
            return {"status": "ok"}
        if path == "get_server_capabilities":
            return {"supported_models": [{"model_name": self.base.name}]}
        kind, _, name = path.partition("/")
        if kind == "samplers" and (known := self._told(lambda: self._sampler_of(name))) is not None:
            return {"sampler_id": name, "base_model": self.base.name, "model_path": known.get("path")}
        page = self._told(lambda: run_page(path, self._folder, self.base.name))
        if page is None:
            raise RefusedRequest(f"this server has no {path:.100}", 404)
        return page

    def delete(self, path: str) -> dict[str, Any]:
        """Answer a DELETE, which is of a checkpoint. RefusedRequest where there is none."""
        if not self._told(lambda: delete_checkpoint(path, self._folder, self._store)):
            raise RefusedRequest(f"this server has no {path:.100}", 404)
        return {}

    def forward_backward(self, body: bytes) -> dict[str, Any]:
        """Keep a request in protobuf. RefusedRequest where it cannot be read at all."""
        try:
            message = forward_message(body)
        except WrongRequest as problem:
            raise RefusedRequest(str(problem)) from problem
        return self._submit(message.model_id, message.seq_id, StoredMessage(body, True, FORWARD))

    def _submit(self, model_id: str, seq: Any, message: StoredMessage) -> dict[str, Any]:
        if type(seq) is not int or seq < 1:
            raise RefusedRequest(f"seq_id must be a whole number of at least 1, got {seq!r:.40}")
        return {"request_id": self._told(lambda: self.desk.submit(model_id, seq, message)), "model_id": model_id}

    # --- sessions and clients

    def _create_session(self, given: dict[str, Any]) -> dict[str, Any]:
        session = secrets.token_hex(16)
        self._store.open_session(session, {"created": time.time(), "tags": given.get("tags")})
        return {"session_id": session, "type": "create_session"}

    def _heartbeat(self, given: dict[str, Any]) -> dict[str, Any]:
        self._check_session(given.get("session_id"))
        return {"type": "session_heartbeat"}

    def _check_session(self, session: Any) -> str:
        if not isinstance(session, str) or not _SESSION.fullmatch(session) or not self._store.has_session(session):
            raise RefusedRequest(f"there is no session '{session!s:.60}' on this server; create it first", 410)
        return session

    def _folder(self, model_id: str) -> ClientFolder:
        found = _CLIENT.fullmatch(model_id)
        if found is None:
            raise UnknownRequest(f"there is no training client '{model_id:.100}' on this server; create it first")
        return self._store.client(found[1], int(found[2]))

    def _create_model(self, given: dict[str, Any]) -> dict[str, Any]:
        def made() -> tuple[LoraSpec, ClientState]:
            self._check_base(given.get("base_model"))
            check_optimizer(given.get("optimizer_config"))
            if given.get("lora_config") is None:
                raise WrongRequest("create_model needs a lora_config, because this server trains adapters")
            spec = lora_of(given["lora_config"], lambda: secrets.randbits(63))
            spec = LoraSpec(0, spec.seed, ()) if self.base.is_full else spec
            return spec, ClientState.new(self.base.new_weights(spec))

        return self._create(given, {"type": "create_model"}, made)

    def _create_from_state(self, given: dict[str, Any]) -> dict[str, Any]:
        def made() -> tuple[LoraSpec, ClientState]:
            if given.get("base_model") is not None:
                self._check_base(given["base_model"])
            check_optimizer(given.get("optimizer_config"))
            folder, spec = self._store.checkpoint(str(given.get("path")))
            state = load_checkpoint(folder, self.base.layout_of(spec))
            return spec, loaded_state(state, bool(given.get("optimizer")), self.base.move)

        return self._create(given, {"type": "load_weights", "path": given.get("path")}, made)

    def _create(
        self, given: dict[str, Any], answer: dict[str, Any], made: Callable[[], tuple[LoraSpec, ClientState]]
    ) -> dict[str, Any]:
        """Make a training client, unless it is there already; a mistake becomes its future's."""
        session = self._check_session(given.get("session_id"))
        number = given.get("model_seq_id")
        if type(number) is not int or not 0 <= number < 10**9:
            raise RefusedRequest(f"model_seq_id must be a whole number, got {number!r:.40}")
        files = self._store.client(session, number)
        request_id = f"{files.model_id}:0"
        with self._creating:
            if not files.exists:
                try:
                    spec, state = made()
                    files.create(spec, state, {**answer, "model_id": files.model_id}, given.get("user_metadata"))
                except WrongRequest as problem:
                    self._failed[request_id] = error_answer(str(problem), USER)
                    _bound(self._failed, _KEPT_SAMPLES)
        return {"request_id": request_id, "model_id": files.model_id}

    def _check_base(self, name: Any) -> None:
        if name != self.base.name:
            raise WrongRequest(f"this server has no base model '{name!s:.100}', only '{self.base.name}'")

    def _info(self, given: dict[str, Any]) -> dict[str, Any]:
        client = self.desk.client(str(given.get("model_id")))
        return {
            "type": "get_info",
            "model_id": client.files.model_id,
            "model_data": {"model_name": self.base.name, "tokenizer_id": self.base.tokenizer},
            "is_lora": not self.base.is_full,
            "lora_rank": client.spec.rank or None,
            "model_name": self.base.name,
        }

    def _weights_info(self, given: dict[str, Any]) -> dict[str, Any]:
        _, spec = self._store.checkpoint(str(given.get("tinker_path")))
        switches = dict(zip(("train_attn", "train_mlp", "train_unembed"), PARTS, strict=True))
        trained = {name: part in spec.parts for name, part in switches.items()}
        return {"base_model": self.base.name, "is_lora": spec.rank > 0, "lora_rank": spec.rank or None, **trained}

    # --- sampling

    def _create_sampler(self, given: dict[str, Any]) -> dict[str, Any]:
        session, number = self._check_session(given.get("session_id")), given.get("sampling_session_seq_id")
        if type(number) is not int or not 0 <= number < 10**9:
            raise RefusedRequest(f"sampling_session_seq_id must be a whole number, got {number!r:.40}")
        path = given.get("model_path")
        if path is not None:
            self._store.checkpoint(str(path))
        else:
            self._check_base(given.get("base_model"))
        return {"type": "create_sampling_session", "sampling_session_id": self.open_sampler(session, number, path)}

    def open_sampler(self, session: str, number: int, path: str | None) -> str:
        """Keep a sampling session, from which weights it draws; return its id. path None: the base's."""
        self._store.write_sampler(session, number, {"path": path})
        return f"{session}:sample:{number}"

    def _sampler_of(self, name: str) -> dict[str, Any] | None:
        found = _SAMPLER.fullmatch(name)
        return None if found is None else self._store.sampler(found[1], int(found[2]))

    def _sample(self, given: dict[str, Any]) -> dict[str, Any]:
        name, seq = str(given.get("sampling_session_id")), given.get("seq_id")
        if type(seq) is not int or seq < 0:
            raise RefusedRequest(f"seq_id must be a whole number, got {seq!r:.40}")
        known = self._sampler_of(name)
        if known is None:
            raise RefusedRequest(f"there is no sampling session '{name:.100}' on this server; create it first", 404)
        request_id = f"{name}:{seq}"
        with self._lock:
            job = self._samples.get(request_id)
        if job is None:
            fields = Fields(given, "asample")
            fields.skip("sampling_session_id", "seq_id", "base_model", "model_path")
            order = sample_of(fields, self.base.bounds)
            if self._sampler.waiting + order.samples > self.base.most_waiting:
                raise RefusedRequest(
                    f"{self._sampler.waiting} sequences are waiting (--max_waiting {self.base.most_waiting}); try "
                    "again later",
                    429,
                )
            job = self._sample_job(order, known.get("path"), request_id)
        ids = [f"{request_id}:{place}" for place in range(job.order.samples)]
        return {"request_id": request_id, "sample_sequence_ids": ids}

    def _sample_job(self, order: SampleOrder, path: str | None, request_id: str) -> SampleJob:
        # Without a seed: one of the request's own, so that it draws alike should it be sent again after a restart.
        seed = request_id if order.seed is None else str(order.seed)
        job = SampleJob(order, self._weights_of(path), seed)
        with self._lock:
            known = self._samples.setdefault(request_id, job)
            if known is not job:
                return known
            for old in list(self._samples)[: max(0, len(self._samples) - _KEPT_SAMPLES)]:
                if self._samples[old].done.is_set():
                    del self._samples[old]
        self._sampler.submit(job)
        self.desk.wake()
        return job

    def _weights_of(self, path: str | None) -> SamplerWeights:
        if path is None:
            return self._base_weights
        folder, spec = self._store.checkpoint(path)
        key = path, (folder / "checkpoint.json").stat().st_mtime_ns
        with self._lock:
            if key not in self._weights:
                layout = self.base.layout_of(spec)
                self._weights[key] = SamplerWeights(self.base.move(load_weights(folder, layout)), layout)
            self._weights.move_to_end(key)
            _bound(self._weights, _MOST_SAMPLERS)
            return self._weights[key]

    def _cancel(self, given: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            job = self._samples.get(str(given.get("request_id")))
        if job is not None:
            job.is_cancelled = True
        return {"status": "ok"}

    # --- answers

    def retrieve(self, given: Any) -> StoredMessage:
        """Return the answer to a request, which waits a while for it. RefusedRequest where there is none."""
        request_id = str(given.get("request_id")) if isinstance(given, dict) else ""
        if request_id in self._failed:
            return json_message(self._failed[request_id])
        found = _REQUEST.fullmatch(request_id)
        if found is None:
            raise RefusedRequest(f"there is no request '{request_id:.100}' on this server", 410)
        if found[2] == "sample":
            return self._sampled(request_id)
        try:
            answer = self._told(lambda: self.desk.wait(found[1], int(found[3]), HOLD_SECONDS))
        except RefusedRequest as problem:
            raise RefusedRequest(str(problem), max(problem.status, 410)) from problem
        return _try_again(request_id) if answer is None else answer

    def _sampled(self, request_id: str) -> StoredMessage:
        with self._lock:
            job = self._samples.get(request_id)
        if job is None:
            raise RefusedRequest(
                f"request '{request_id:.100}' is unknown to this server or has expired; send it again", 410
            )
        if not job.done.wait(HOLD_SECONDS):
            return _try_again(request_id)
        if job.error is not None:
            return json_message(error_answer(*job.error))
        assert job.result is not None
        return StoredMessage(sample_answer(job.result, job.order), is_proto=True)


def _try_again(request_id: str) -> StoredMessage:
    body = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    return StoredMessage(json.dumps(body).encode(), is_proto=False)


def _bound(kept: OrderedDict[Any, Any], most: int) -> None:
    while len(kept) > most:
        kept.popitem(last=False)
