"""HTTP connections whose answer, headers included, has one deadline: a server that sends a byte now and then is left as
one that sends none."""

from __future__ import annotations

import http.client
import math
import socket
import ssl
import time
import urllib.request
from typing import Any

_LEAST_SECONDS = 1e-3  # 0 would not wait at all


class _Ends:
    """Receives until `end`, in time.monotonic's seconds, then raises TimeoutError. Its timeout is the longest gap."""

    end = math.inf

    def recv_into(self: Any, *given: Any) -> int:
        left = max(self.end - time.monotonic(), _LEAST_SECONDS)
        self.settimeout(min(left, self.gettimeout() or math.inf))
        return int(super().recv_into(*given))  # type: ignore[misc]


class _PlainSocket(_Ends, socket.socket):
    pass


class _TlsSocket(_Ends, ssl.SSLSocket):
    pass


def end_after(connected: Any, seconds: float) -> None:
    """Give a socket of this module its deadline, so many seconds from now."""
    connected.end = time.monotonic() + seconds


def ending_context() -> ssl.SSLContext:
    """The default context, for `EndingTlsConnection`."""
    context = ssl.create_default_context()
    context.sslsocket_class = _TlsSocket
    return context


class EndingConnection(http.client.HTTPConnection):
    """Has its timeout, which has to be given, for all of the answer."""

    def connect(self) -> None:
        assert self.timeout is not None, "it is the deadline"
        super().connect()
        plain: socket.socket = self.sock
        self.sock = _PlainSocket(plain.family, plain.type, plain.proto, fileno=plain.detach())
        self.sock.settimeout(self.timeout)
        end_after(self.sock, self.timeout)


class EndingTlsConnection(http.client.HTTPSConnection):
    """The same of an `ending_context`."""

    def connect(self) -> None:
        assert self.timeout is not None, "it is the deadline"
        super().connect()
        end_after(self.sock, self.timeout)


class EndingHttp(urllib.request.HTTPHandler):
    """For urllib's openers."""

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(EndingConnection, req)


class EndingHttps(urllib.request.HTTPSHandler):
    """For urllib's openers."""

    def __init__(self) -> None:
        self._ending = ending_context()
        super().__init__(context=self._ending)

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(EndingTlsConnection, req, context=self._ending)
