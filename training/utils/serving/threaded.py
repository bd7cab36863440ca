"""An HTTP server with a bounded number of threads, each for a bounded time. Its address is the loopback one by default.

The standard library's `ThreadingHTTPServer` starts a thread for each connection and waits for its request as long as
that takes.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from training.utils.serving.door import ADDRESS

MOST_CONNECTIONS = 32  # a browser opens six
MOST_SECONDS = 30.0  # of a connection, from its first byte to the last one of its answer


class BoundedServer(ThreadingHTTPServer):
    """Serves at most `most` connections at once, each for at most `seconds`; one more is closed unanswered. port 0
    takes a free one."""

    daemon_threads = True
    block_on_close = False  # a reader that does not read ends with the program

    def __init__(
        self,
        port: int,
        handler: type[BaseHTTPRequestHandler],
        seconds: float = MOST_SECONDS,
        most: int = MOST_CONNECTIONS,
        *,
        address: str = ADDRESS,
    ) -> None:
        self._seconds, self._most = seconds, most
        self.request_queue_size = most
        self._open: dict[Any, float] = {}  # each connection, and when it ends
        self._lock = threading.Lock()
        super().__init__((address, port), handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Admit a connection while there is room for one more."""
        with self._lock:
            if len(self._open) >= self._most:
                return False
            self._open[request] = time.monotonic() + self._seconds
        return True

    def allow(self, request: Any, seconds: float | None = None) -> None:
        """Let a connection go on for so long from now; by default as long as at its beginning."""
        with self._lock:
            if request in self._open:
                self._open[request] = time.monotonic() + (self._seconds if seconds is None else seconds)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections that take too long; their threads' reads or writes fail. `serve_forever` calls it twice a
        second."""
        with self._lock:
            late = [request for request, end in self._open.items() if time.monotonic() > end]
            for request in late:
                try:
                    request.shutdown(socket.SHUT_RDWR)
                except OSError:  # ended by itself meanwhile
                    continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print errors of the program; a visitor that went away is not one."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)
