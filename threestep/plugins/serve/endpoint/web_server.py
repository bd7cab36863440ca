"""The paths of an endpoint in OpenAI's form: what is answered where, whole or as a stream."""

from __future__ import annotations

import json
import select
import socket
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import unquote

from threestep.plugins.serving.keyed import KeyedHandler, KeyedServer, parsed
from threestep.plugins.serving.refusals import RefusedRequest

if TYPE_CHECKING:
    from threestep.plugins.serve.endpoint.service import Answering, Service

CHAT, TEXT, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
_ANSWER_SECONDS = 24 * 3600.0


class EndpointServer(KeyedServer):
    """Serves a model to whoever has the key. most_bytes: of a request's body. most_connections: at once."""

    def __init__(self, port: int, service: Service, key: str, most_bytes: int, *, most_connections: int) -> None:
        """port 0 takes a free one. OSError where it is taken."""
        super().__init__(port, _Handler, key, most_bytes, most_connections=most_connections)
        self.service = service


class _Handler(KeyedHandler):
    server: EndpointServer

    def get(self, path: str) -> None:
        if path == MODELS:
            self.send(200, self.server.service.models())
        elif path.startswith(f"{MODELS}/"):
            self.send(200, self.server.service.model_card(unquote(path.removeprefix(f"{MODELS}/"))))
        elif path in (CHAT, TEXT):
            self.refuse_method()
        else:
            self._refuse_path(path)

    def _refuse_path(self, path: str) -> None:
        raise RefusedRequest(f"there is no {path:.100}; this server has {CHAT}, {TEXT} and {MODELS}", 404)

    def post(self, path: str) -> None:
        if path == MODELS:
            self.refuse_method()
        if path not in (CHAT, TEXT):
            self._refuse_path(path)
        given = parsed(self.body())
        self.server.allow(self.connection, _ANSWER_SECONDS)
        answering: Answering = self.unfailing(partial(self.server.service.begun, given, path == CHAT))
        try:
            if answering.request.stream:
                self._stream(answering)
            else:
                whole = answering.whole(partial(hung_up, self.connection))
                self.close_connection = self.close_connection or whole is None
                if whole is not None:
                    self.send(200, whole)
        finally:
            answering.cancel()

    def _stream(self, answering: Answering) -> None:
        """Server-sent events; the connection ends with them."""
        self.close_connection = True
        self.send_response(200)
        self.send_headers("text/event-stream; charset=utf-8", [("Connection", "close")])
        self.end_headers()
        try:
            for chunk in answering.chunks(partial(hung_up, self.connection)):
                self._event(json.dumps(chunk, ensure_ascii=False))
        except RefusedRequest as refusal:
            self._event(json.dumps(refusal.body, ensure_ascii=False))
            return
        self._event("[DONE]")

    def _event(self, text: str) -> None:
        self.wfile.write(f"data: {text}\n\n".encode("utf-8", "replace"))


def hung_up(connection: socket.socket) -> bool:
    """True if the other side has closed the connection."""
    looks = select.poll()
    looks.register(connection, select.POLLIN)
    try:
        return bool(looks.poll(0)) and connection.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True
