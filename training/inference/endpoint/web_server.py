"""HTTP on the loopback address: who is let in, how much may be sent, and what is answered where."""

from __future__ import annotations

import hmac
import json
import select
import socket
import threading
import time
import traceback
from functools import partial
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from training.inference.endpoint.refusals import RefusedRequest
from training.utils.base.storage import parse_json
from training.utils.serving.threaded import BoundedServer

if TYPE_CHECKING:
    from training.inference.endpoint.service import Answering, Service

CHAT, TEXT, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
_SILENT_SECONDS = 30.0  # in which a request must be there, whole; between two requests of a connection too
_ANSWER_SECONDS = 24 * 3600.0
_STUCK_SECONDS = 60.0  # in which a client reads nothing of what is sent
_MOST_LEVELS = 64  # of values in values


class EndpointServer(BoundedServer):
    """Serves a model to whoever has the key. most_bytes: of a request's body. most_connections: at once."""

    def __init__(self, port: int, service: Service, key: str, most_bytes: int, *, most_connections: int) -> None:
        """port 0 takes a free one. OSError where it is taken."""
        super().__init__(port, _Handler, _SILENT_SECONDS, most_connections)
        self.service, self._key, self.most_bytes = service, key, most_bytes
        self.answering = 0  # requests whose answer is not sent
        self.counting = threading.Lock()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def close_when_quiet(self, seconds: float = 2.0) -> None:
        """Take no more connections; let the last answers be sent, for so long at most."""
        deadline = time.monotonic() + seconds
        while self.answering and time.monotonic() < deadline:
            time.sleep(0.02)
        self.server_close()

    def is_key(self, given: str) -> bool:
        """True for the key; takes the same time however much of it is right."""
        return hmac.compare_digest(given.encode("utf-8", "surrogatepass"), self._key.encode())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _STUCK_SECONDS
    server_version, sys_version = "Threestep", ""
    server: EndpointServer

    def log_message(self, *_: Any) -> None:
        """Nothing: prompts are nobody's but the client's."""

    def do_GET(self) -> None:
        self._guarded(self._get)

    def do_POST(self) -> None:
        self._guarded(self._post)

    def _other(self) -> None:
        self._guarded(self._refuse_method)

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_HEAD = _other

    def _guarded(self, answer: Any) -> None:
        """Let those in who have the key; send refusals in OpenAI's form."""
        self._count(1)
        try:
            kind, _, key = self.headers.get("Authorization", "").partition(" ")
            if kind.lower() != "bearer" or not self.server.is_key(key.strip()):
                self.close_connection = True  # the body is not read
                raise RefusedRequest(
                    "this server expects the key that it printed when it started, as 'Authorization: Bearer KEY'",
                    401,
                    code="invalid_api_key",
                )
            answer()
        except RefusedRequest as refusal:
            self._send(refusal.status, refusal.body)
        finally:
            self._count(-1)
            self.server.allow(self.connection)

    def _count(self, change: int) -> None:
        with self.server.counting:
            self.server.answering += change

    def _refuse_method(self) -> None:
        self.close_connection = True
        raise RefusedRequest(f"{self.path:.100} takes no {self.command}", 405)

    def _get(self) -> None:
        path = self.path.partition("?")[0]
        if path == MODELS:
            self._send(200, self.server.service.models())
        elif path.startswith(f"{MODELS}/"):
            self._send(200, self.server.service.model_card(unquote(path.removeprefix(f"{MODELS}/"))))
        elif path in (CHAT, TEXT):
            self._refuse_method()
        else:
            self._refuse_path(path)

    def _refuse_path(self, path: str) -> None:
        raise RefusedRequest(f"there is no {path:.100} here, but {CHAT}, {TEXT} and {MODELS}", 404)

    def _post(self) -> None:
        path = self.path.partition("?")[0]
        body = self._body()
        if path == MODELS:
            self._refuse_method()
        if path not in (CHAT, TEXT):
            self._refuse_path(path)
        try:
            given = parse_json(body, _MOST_LEVELS)
        except ValueError as problem:
            raise RefusedRequest(f"the body expects JSON: {str(problem):.200}") from problem
        self.server.allow(self.connection, _ANSWER_SECONDS)
        answering = self._begun(given, path == CHAT)
        try:
            if answering.request.stream:
                self._stream(answering)
            else:
                whole = answering.whole(partial(hung_up, self.connection))
                self.close_connection = self.close_connection or whole is None
                if whole is not None:
                    self._send(200, whole)
        finally:
            answering.cancel()

    def _begun(self, given: Any, is_chat: bool) -> Answering:
        try:
            return self.server.service.begun(given, is_chat)
        except RefusedRequest:
            raise
        except Exception as problem:  # the server outlives whatever a tokenizer or a template raises
            traceback.print_exception(problem)
            raise RefusedRequest("the server failed, and its log says why", 500) from problem

    def _body(self) -> bytes:
        length, most = self.headers.get("Content-Length", ""), self.server.most_bytes
        if not (length.isascii() and length.isdigit()):
            self.close_connection = True
            raise RefusedRequest("a request expects Content-Length and a body of that length", 411)
        if int(length) > most:
            self.close_connection = True
            raise RefusedRequest(f"the body expects at most {most:,} bytes, got {int(length):,}", 413)
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True
            raise RefusedRequest(f"the body ends after {len(body):,} of {int(length):,} bytes")
        return body

    def _send(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        self.send_response(status)
        self._headers("application/json", [("Content-Length", str(len(text)))])
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if status in (429, 503):
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _stream(self, answering: Answering) -> None:
        """Server-sent events; the connection ends with them."""
        self.close_connection = True
        self.send_response(200)
        self._headers("text/event-stream; charset=utf-8", [("Connection", "close")])
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

    def _headers(self, kind: str, others: list[tuple[str, str]]) -> None:
        for name, value in [
            ("Content-Type", kind), ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"), *others
        ]:  # fmt: skip
            self.send_header(name, value)


def hung_up(connection: socket.socket) -> bool:
    """True if the other side has closed the connection."""
    looks = select.poll()
    looks.register(connection, select.POLLIN)
    try:
        return bool(looks.poll(0)) and connection.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True
