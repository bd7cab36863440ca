"""HTTP for whoever has the key: who is let in, how much may be sent, and the form of what is refused.

The key is read first, then the path, and only then the body. Knows nothing of what is served.
"""

from __future__ import annotations

import hmac
import json
import re
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from threestep.plugins.serving.access import ADDRESS
from threestep.plugins.serving.refusals import RefusedRequest
from threestep.plugins.serving.threaded import BoundedHandler, BoundedServer
from training.utils.base.storage import parse_json

_SILENT_SECONDS = 30.0  # in which a request must be there, whole; between two requests of a connection too
_STUCK_SECONDS = 60.0  # in which a client reads nothing of what is sent
_MOST_LEVELS = 64  # of values in values
_LENGTH = re.compile("[0-9]{1,18}")


class KeyedServer(BoundedServer):
    """Serves whoever has the key. most_bytes: of a request's body. most_connections: at once."""

    def __init__(
        self,
        port: int,
        handler: type[KeyedHandler],
        key: str,
        most_bytes: int,
        *,
        most_connections: int,
        address: str = ADDRESS,
    ) -> None:
        """port 0 takes a free one. OSError where it is taken."""
        super().__init__(port, handler, _SILENT_SECONDS, most_connections, address=address)
        self._key, self.most_bytes = key, most_bytes
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


class KeyedHandler(BoundedHandler):
    """Reads and answers requests. Handlers of what is served have `get` and `post`, which get the path, and read the
    body if there is something at it."""

    protocol_version = "HTTP/1.1"
    timeout = _STUCK_SECONDS
    server: KeyedServer
    key_form = "Authorization: Bearer KEY"
    _has_unread = False  # a body that the next request would begin with

    def given_key(self) -> str:
        """Return the key of the request, "" without one."""
        kind, _, key = self.headers.get("Authorization", "").partition(" ")
        return key.strip() if kind.lower() == "bearer" else ""

    def get(self, path: str) -> None:
        """Answer a GET; RefusedRequest for one that is not answered."""
        self.refuse_method()

    def post(self, path: str) -> None:
        """Answer a POST; RefusedRequest for one that is not answered."""
        self.refuse_method()

    def stranger(self) -> RefusedRequest:
        """Return the answer to a request without the key."""
        sentence = f"this server needs the key that it printed when it started, sent as '{self.key_form}'"
        return RefusedRequest(sentence, 401, code="invalid_api_key")

    def do_GET(self) -> None:
        self._guarded(lambda: self.get(self.path.partition("?")[0]))

    def do_POST(self) -> None:
        self._guarded(lambda: self.post(self.path.partition("?")[0]))

    def _other(self) -> None:
        self._guarded(self.refuse_method)

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_HEAD = _other

    def _guarded(self, answer: Callable[[], None]) -> None:
        """Let those in who have the key; send refusals in OpenAI's form."""
        self._count(1)
        self._has_unread = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        try:
            if not self.server.is_key(self.given_key()):
                self.close_connection = True
                raise self.stranger()
            if not self.server.let_in(self.connection):
                self.close_connection = True
                raise RefusedRequest("this server is at its request limit; try again later", 503)
            answer()
        except RefusedRequest as refusal:
            self.send(refusal.status, refusal.body)
        finally:
            self._count(-1)
            self.server.allow(self.connection)

    def _count(self, change: int) -> None:
        with self.server.counting:
            self.server.answering += change

    def refuse_method(self) -> None:
        raise RefusedRequest(f"{self.path:.100} takes no {self.command}", 405)

    def body(self) -> bytes:
        """Return the body of the request."""
        given, most = self.headers.get_all("Content-Length", []), self.server.most_bytes
        if len(given) != 1 or not _LENGTH.fullmatch(given[0]) or "Transfer-Encoding" in self.headers:
            raise RefusedRequest("a request needs Content-Length and a body of that length", 411)
        length = int(given[0])
        if length > most:
            raise RefusedRequest(f"the body may have at most {most:,} bytes, got {length:,}", 413)
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        body = self.rfile.read(length)
        if len(body) < length:
            raise RefusedRequest(f"the body ends after {len(body):,} of {length:,} bytes")
        self._has_unread = False
        return body

    def unfailing(self, work: Callable[[], Any]) -> Any:
        """Return what `work` returns; what it raises, but for refusals, is printed and answered as a failure."""
        try:
            return work()
        except RefusedRequest:
            raise
        except Exception as problem:  # the server outlives whatever a tokenizer or a template raises
            traceback.print_exception(problem)
            raise RefusedRequest("the server failed; see its log", 500) from problem

    def send(self, status: int, body: dict[str, Any]) -> None:
        """Send a whole answer in JSON."""
        self.send_bytes(status, "application/json", json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"))

    def send_bytes(self, status: int, kind: str, text: bytes) -> None:
        """Send a whole answer. kind: its content type."""
        self.close_connection |= self._has_unread
        self.send_response(status)
        self.send_headers(kind, [("Content-Length", str(len(text)))])
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if status in (429, 503):
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def send_headers(self, kind: str, others: list[tuple[str, str]]) -> None:
        """Send the headers that every answer has, and others."""
        for name, value in [
            ("Content-Type", kind), ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"), *others
        ]:  # fmt: skip
            self.send_header(name, value)


def parsed(body: bytes) -> Any:
    """Return the value of a request's body, which is JSON."""
    try:
        return parse_json(body, _MOST_LEVELS)
    except ValueError as problem:
        raise RefusedRequest(f"the body must be JSON: {str(problem):.200}") from problem
