"""An HTTP server with a bounded number of threads, each for a bounded time. Its address is the loopback one by default.

The standard library's `ThreadingHTTPServer` starts a thread for each connection and waits for its request as long as
that takes. Here whoever has not shown a key or a token is a stranger: a few strangers are heard at once, for a few
seconds, and one more takes the place of the oldest. So those who keep silent keep nobody out.
"""

from __future__ import annotations

import contextlib
import io
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from threestep.plugins.serving.access import ADDRESS

MOST_CONNECTIONS = 32  # that are let in, at once; a browser opens six
MOST_STRANGERS = 256  # at once; their requests arrive within milliseconds
MOST_SECONDS = 30.0  # of a connection, from its first byte to the last one of its answer
MOST_HEAD_BYTES = 2**16  # of a request before its body


class BoundedServer(ThreadingHTTPServer):
    """Serves at most `most` connections at once that are let in, each for at most `seconds`. port 0 takes a free
    one."""

    daemon_threads = True
    block_on_close = False  # a reader that does not read ends with the program
    request_queue_size = socket.SOMAXCONN

    def __init__(
        self,
        port: int,
        handler: type[BoundedHandler],
        seconds: float = MOST_SECONDS,
        most: int = MOST_CONNECTIONS,
        *,
        address: str = ADDRESS,
    ) -> None:
        self._seconds, self._most = seconds, most
        self._strangers: dict[Any, float] = {}  # each connection, the oldest first, and when it ends
        self._let_in: dict[Any, float] = {}
        self._lock = threading.Lock()
        self._room = threading.Semaphore(MOST_STRANGERS + most)
        super().__init__((address, port), handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Admit a stranger, in place of the oldest one where there are too many."""
        with self._lock:
            if len(self._strangers) >= MOST_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _end(oldest)
            self._strangers[request] = time.monotonic() + self._seconds
        return True

    def let_in(self, request: Any) -> bool:
        """Count a connection among those that showed their key; False where it is too late or there are too many."""
        with self._lock:
            if request in self._let_in:
                return True
            end = self._strangers.get(request)
            if end is None or len(self._let_in) >= self._most:
                return False
            self._let_in[request] = self._strangers.pop(request)
            return True

    def allow(self, request: Any, seconds: float | None = None) -> None:
        """Let a connection that was let in go on for so long from now; by default as long as at its beginning."""
        with self._lock:
            if request in self._let_in:
                self._let_in[request] = time.monotonic() + (self._seconds if seconds is None else seconds)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._room.acquire()  # those of strangers who lost their place end at once
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system has no thread left
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._strangers.pop(request, None)
            self._let_in.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections that take too long; their threads' reads or writes fail. `serve_forever` calls it twice a
        second."""
        now = time.monotonic()
        with self._lock:
            for connections in (self._strangers, self._let_in):
                for request, end in connections.items():
                    if now > end:
                        _end(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors of the program; a visitor that went away is not one."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class BoundedHandler(BaseHTTPRequestHandler):
    """Reads requests whose head is short; says nothing to strangers but what `do_GET` and its like say."""

    server_version, sys_version = "Threestep", ""
    server: BoundedServer

    def setup(self) -> None:
        super().setup()
        self.rfile = _Head(self.connection.makefile("rb", 0))

    def handle_one_request(self) -> None:
        self.rfile.left = MOST_HEAD_BYTES  # type: ignore[attr-defined]
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Leave requests of the form before HTTP/1.0 unanswered: they have no place for a key."""
        return super().parse_request() and self.request_version != "HTTP/0.9"

    def handle_expect_100(self) -> bool:
        """Promise nothing yet: the key comes first."""
        return True

    def send_error(self, *_: Any, **__: Any) -> None:
        """Close, without an answer, a connection whose request is no HTTP."""
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Nothing: paths have keys, and a page asks every two seconds."""


class _Head(io.BufferedReader):
    """Lines of so many bytes together. A body is read by its length."""

    left = MOST_HEAD_BYTES

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(self.left if size is None or size < 0 else min(size, self.left))
        self.left -= len(line)
        if not self.left:
            raise ConnectionError("the request has a long header")
        return line


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # ended by itself meanwhile
        connection.shutdown(socket.SHUT_RDWR)
