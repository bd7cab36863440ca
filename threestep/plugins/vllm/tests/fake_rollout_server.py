"""A server of the protocol of `--rollout_engine vllm_server` that draws by a hash in place of a model, with faults.

Its tokens are a function of the prompt, the seed and the weights' sum alone, as those of real servers are.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from threestep.plugins.vllm.servers.experts import packed_experts
from threestep.plugins.vllm.servers.groups import End, Place, WeightGroup
from threestep.plugins.vllm.servers.protocol import PROTOCOL
from threestep.plugins.vllm.servers.stream import read, received, sums_of, with_adapters
from threestep.plugins.vllm.weights import BitSums

KEY = "a key of tests"
VOCABULARY = 64


class FakeServer:
    """Serves from its beginning to its `stop`.

    faults: by name, what it does wrong from now on: `die_after` responses, `slow` seconds a response, `nonsense` (a
        kind), `die_in_transfer`, `refuse_finish`. says: changes to what it says of itself.
    """

    def __init__(self, says: Mapping[str, Any] | None = None, port: int = 0, host: str = "127.0.0.1") -> None:
        self.says = dict(says or {})
        self.faults: dict[str, Any] = {}
        self.version, self.weights = "default", 0
        self.updating = False
        self.kept: tuple[list[Any], dict[str, int]] | None = None
        self.base: dict[str, Any] = {}
        self.drawn: list[list[int]] = []  # the prompt of each response
        self.experts: dict[str, Any] = {}  # of responses that are not taken yet
        self.resets = self.transfers = self.meetings = self.by_group = 0
        self.group: WeightGroup | None = None
        self._server = _Quiet((host, port), _handler(self))
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return JSON; an exception is an answer of 500."""
        name = path.split("?")[0].strip("/").replace("/", "_")
        return getattr(self, f"on_{name}")(body)

    def on_weight_info(self, body: Any) -> Any:
        return {"weight_version": self.version}

    def on_collective_rpc(self, body: Any) -> Any:
        if body["method"] == "threestep_experts":
            return {"results": [self.experts.pop(body["args"][0], None)]}
        assert body["method"] == "threestep_prepare" and body["kwargs"] in ({}, {"records_experts": True})
        own = {"protocol": PROTOCOL, "vllm": "0.32.0", "tempers": True, "dtype": "float32", "longest_tokens": 64}
        own |= {
            "config": {},
            "architectures": ["LlamaForCausalLM"],
            "tokenizer": False,
            "end": End("cpu", "", "")._asdict(),
        }
        return {"results": [{**own, **self.says}]}

    def on_detokenize(self, body: Any) -> Any:
        return {"prompt": " ".join(f"t{token}" for token in body["tokens"])}

    def on_init_weight_transfer_engine(self, body: Any) -> Any:
        assert not self.faults.get("refuse_group"), "no network"
        self.group = WeightGroup(Place(**body["init_info"]), 1, torch.device("cpu"))
        self.meetings += 1
        return {}

    def on_start_weight_update(self, body: Any) -> Any:
        assert not self.updating, "already active"
        self.updating = True
        return {}

    def on_update_weights(self, body: Any) -> Any:
        self.updating = False
        where = body["update_info"]
        if self.faults.get("die_in_transfer"):
            import socket

            connection = socket.create_connection((where["host"], where["port"]))
            connection.sendall(where["secret"].encode())
            connection.recv(1000)
            connection.close()
            if self.group is not None:
                self.group.close()
            self.stop()
            raise OSError("killed")
        if "path" in where:
            self.kept = read(where["path"])
        else:
            group = self.group if where["by_group"] else None
            self.kept = received(where["host"], where["port"], where["secret"], where["seconds"], group=group)
        self.by_group += where.get("by_group", False)
        self.updating = True
        return {}

    def on_finish_weight_update(self, body: Any) -> Any:
        assert self.updating and self.kept is not None
        assert not self.faults.get("refuse_finish"), "no room"
        frames, sums = self.kept
        assert {layer or "": own for layer, own in sums_of(frames).by_layer.items()} == sums
        weights = {frame.name: frame.tensor for frame in frames if frame.of_adapter is None}
        self.base = weights or self.base
        arrived = BitSums()
        for name, tensor in with_adapters(self.base, frames).items():
            arrived.add(name, tensor)
        self.weights, self.version, self.updating, self.kept = arrived.total, body["weight_version"], False, None
        self.transfers += 1
        return {}

    def on_reset_prefix_cache(self, body: Any) -> Any:
        self.resets += 1
        return {"success": True}

    def on_inference_v1_generate(self, body: Any) -> Any:
        if "die_after" in self.faults:
            self.faults["die_after"] -= 1
            if self.faults["die_after"] < 0:
                threading.Thread(target=self.stop, daemon=True).start()
                raise OSError("killed")
        time.sleep(self.faults.get("slow", 0.0))
        self.drawn.append(body["token_ids"])
        choice = drawn_choice(body, self.weights)
        if name := body.get("request_id"):
            assert body["cache_salt"] == name
            self.experts[name] = packed_experts(experts_of([*body["token_ids"], *choice["token_ids"]]))
            if self.faults.get("experts") == "short":
                self.experts[name] = packed_experts(experts_of(body["token_ids"]))
            elif self.faults.get("experts") == "none":
                self.experts.clear()
        choice["weight_versions"] = [{"version": self.version, "start": 0, "end": len(choice["token_ids"])}]
        return {"choices": [spoilt(choice, self.faults.get("nonsense"))]}


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients leave in the middle of answers: that is what is tested."""


def drawn_choice(body: Mapping[str, Any], weights: int) -> dict[str, Any]:
    """Return what a right server draws for a request."""
    sampling = body["sampling_params"]
    stream = random.Random(f"{body['token_ids']} {sampling['seed']} {sampling['temperature']} {weights}")
    ids, reason = list[int](), "length"
    while len(ids) < sampling["max_tokens"] and reason == "length":
        ids.append(stream.randrange(VOCABULARY))
        reason = "stop" if ids[-1] in sampling["stop_token_ids"] else "length"
    content = [{"token_id": token, "logprob": -(token + 1) / 100} for token in ids]
    return {"index": 0, "finish_reason": reason, "token_ids": ids, "logprobs": {"content": content}}


def experts_of(ids: list[int]) -> torch.Tensor:
    """Return int16 [T, 2, 1] of tokens, of which the last has none."""
    return torch.tensor([[[token % 4], [token % 3]] for token in ids[:-1]], dtype=torch.int16)


def spoilt(choice: dict[str, Any], kind: str | None) -> dict[str, Any]:
    """Return an answer with a fault."""
    content = choice["logprobs"]["content"]
    if kind == "token":
        choice["token_ids"][0] = VOCABULARY
    elif kind == "nan":
        content[0]["logprob"] = -9999.0
    elif kind == "lengths":
        content.pop()
    elif kind == "short":
        choice["token_ids"], choice["logprobs"]["content"] = choice["token_ids"][:1], content[:1]
        choice["finish_reason"] = "abort"
    elif kind == "version":
        choice["weight_versions"][0]["version"] = "another"
    elif kind is not None:
        return {"index": 0}
    return choice


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._reply(json.loads(data) if data else {})

        def _reply(self, body: Mapping[str, Any]) -> None:
            if self.headers.get("Authorization") != f"Bearer {KEY}":
                return self._send(401, b"{}")
            try:
                answer = server.answer(self.path, body)
            except OSError as problem:
                if str(problem) == "killed":
                    self.close_connection = True
                    return None
                return self._send(500, json.dumps({"error": str(problem)}).encode())
            except Exception as problem:  # noqa: BLE001 - as a server answers
                return self._send(500, json.dumps({"error": {"message": str(problem)}}).encode())
            if body.get("stream"):
                return self._stream(answer["choices"][0])
            return self._send(200, json.dumps(answer).encode())

        def _stream(self, choice: dict[str, Any]) -> None:
            self.send_response(200)
            self.end_headers()
            tokens = list(zip(choice["token_ids"], choice["logprobs"]["content"], strict=True))
            for place, (token, logprob) in enumerate(tokens):
                last = place == len(tokens) - 1
                part = {"token_ids": [token], "logprobs": {"content": [logprob]}}
                part["finish_reason"] = choice["finish_reason"] if last else None
                try:
                    self.wfile.write(f"data: {json.dumps({'choices': [part]})}\n\n".encode())
                except OSError:
                    return
            self.wfile.write(b"data: [DONE]\n\n")

        def _send(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words: Any) -> None:
            pass

    return Handler
