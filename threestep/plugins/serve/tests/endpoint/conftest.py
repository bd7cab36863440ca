"""A served tiny model, and a server of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from threestep.plugins.serve.endpoint.batch import Batch
from threestep.plugins.serve.endpoint.model import ServedModel, load_served
from threestep.plugins.serve.endpoint.service import Service
from threestep.plugins.serve.endpoint.web_server import EndpointServer
from training.utils.data.rows.arguments import ChatArguments
from training.utils.generation.arguments import SamplingArguments

KEY = "a-key-of-the-tests"
SAMPLING = SamplingArguments(max_new_tokens=24)


@pytest.fixture
def served(save_model: Callable[..., str]) -> ServedModel:
    return load_served(save_model("model"), "tiny", SAMPLING, ChatArguments())


class Client:
    """Requests to a server by the standard library."""

    def __init__(self, server: EndpointServer) -> None:
        self.server = server

    def send(
        self, path: str, body: Any = None, key: str | None = KEY, method: str | None = None, **headers: str
    ) -> tuple[int, Any]:
        """Status and body of the answer; a stream's as a list of its events."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
        text = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = {"Authorization": f"Bearer {key}"} if key is not None else {}
        connection.request(method or ("GET" if body is None else "POST"), path, text, {**given, **headers})
        with contextlib.closing(connection):
            answer = connection.getresponse()
            read = answer.read().decode()
        if answer.getheader("Content-Type", "").startswith("text/event-stream"):
            return answer.status, [event.removeprefix("data: ") for event in read.strip().split("\n\n")]
        return answer.status, json.loads(read)

    def chat(self, text: str = "Hi", **fields: Any) -> Any:
        """The answer to a question, which must be one."""
        messages = [{"role": "user", "content": text}]
        status, answer = self.send("/v1/chat/completions", {"model": "tiny", "messages": messages, **fields})
        assert status == 200, answer
        return answer

    def text(self, text: str = "Hi", **fields: Any) -> str:
        """The text of the answer to a question."""
        return self.chat(text, **fields)["choices"][0]["message"]["content"]


@contextlib.contextmanager
def serving(model: ServedModel, rows: int = 8, waiting: int = 128, start: bool = True) -> Iterator[Client]:
    """A client of a server of `model`. start: it draws."""
    batch = Batch(model.make_rows, rows, waiting)
    server = EndpointServer(0, Service(model, batch, SAMPLING, 0), KEY, 2**16, most_connections=rows + waiting + 16)
    if start:
        batch.start()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield Client(server)
    finally:
        if start:
            batch.close(0)
        server.shutdown()
        server.close_when_quiet()
        thread.join()


@pytest.fixture
def client(served: ServedModel) -> Iterator[Client]:
    with serving(served) as found:
        yield found
