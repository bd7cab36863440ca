"""Requests that no server answers: silent, slow, broken, endless, or whole and without the key; many at once, beside
requests with the key, which go on."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import psutil

_LEFT_OPEN = ("silent", "a letter", "half a line", "half a head", "a body that does not come")
_DEEP = b"[" * 100_000


def hostile_requests(path: str) -> dict[str, bytes]:
    """Requests by their names. path: one that is answered with the key."""
    post = f"POST {path} HTTP/1.1\r\nHost: evil.example\r\n".encode()
    wrong = post + b"Authorization: Bearer wrong\r\nx-api-key: tml-wrong\r\nCookie: a=b\r\n"
    found = {
        "silent": b"",
        "a letter": b"P",
        "half a line": f"POST {path} HT".encode(),
        "half a head": post,
        "a body that does not come": wrong + b"Content-Length: 33554432\r\n\r\n",
        "no key": post + b"Content-Length: 2\r\n\r\n{}",
        "a large body": wrong + b"Content-Length: 1048576\r\n\r\n" + b" " * 2**20,
        "a digit that is none": wrong + "Content-Length: ²\r\n\r\n".encode("latin-1"),
        "many digits": wrong + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n",
        "below nothing": wrong + b"Content-Length: -1\r\n\r\n",
        "in chunks": wrong + b"Transfer-Encoding: chunked\r\n\r\nfffffff\r\n" + b"x" * 2**16,
        "two lengths": wrong + b"Content-Length: 2\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        "deep": wrong + b"Content-Length: %d\r\n\r\n" % len(_DEEP) + _DEEP,
        "a long line": b"GET /" + b"a" * 2**20,
        "a long head": post + b"".join(b"a%d: %s\r\n" % (each, b"b" * 60_000) for each in range(90)),
        "many headers": post + b"a: b\r\n" * 1000 + b"\r\n",
        "first a promise": wrong + b"Content-Length: 9\r\nExpect: 100-continue\r\n\r\n",
        "no HTTP": bytes(range(256)) * 4,
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 500,
        "an old form": f"GET {path}\r\n\r\n".encode(),
        "a web socket": post.replace(b"POST", b"GET") + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    }
    for method in ("GET", "HEAD", "OPTIONS", "TRACE", "CONNECT", "PUT", "DELETE", "FOO"):
        found[method] = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: http://evil.example\r\n\r\n".encode()
    for place in ("/", "/metrics", "/docs", "/%00", "//evil.example/", "/../../etc/passwd", "/?token=wrong"):
        found[place] = f"GET {place} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
    return found


@dataclass
class Attack:
    """What came of it. answers: the statuses by their number, "" of a connection that was closed. asked, failed: the
    requests with the key. slowest: of them, in seconds. threads, bytes: that the server had more than before."""

    answers: Counter[str] = field(default_factory=Counter)
    asked: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    threads: int = 0
    bytes: int = 0

    def check(self, most_threads: int, most_bytes: int = 200 << 20) -> None:
        """AssertionError where a stranger was answered, or who has the key was not, or too much was held."""
        answered = {status for status in self.answers if status and status[0] not in "45"}
        assert not answered and self.answers, self
        assert self.asked and not self.failed, self
        assert self.threads <= most_threads and self.bytes < most_bytes, self


def attack(
    port: int,
    path: str,
    ask: Callable[[], int],
    count: int = 2000,
    silent: int = 1500,
    *,
    process: psutil.Process | None = None,
) -> Attack:
    """Send so many hostile requests to a server, of which the last `silent` stay open; `ask` all the while. ask: sends
    a request with the key, and returns its status. process: of the server; by default this one."""
    found, process = Attack(), process or psutil.Process()
    threads, memory = process.num_threads(), process.memory_info().rss
    requests = hostile_requests(path)
    left_open = [requests[name] for name in _LEFT_OPEN]
    others = [request for name, request in requests.items() if name not in _LEFT_OPEN]
    done = threading.Event()

    def look() -> None:
        found.threads = max(found.threads, process.num_threads() - threads)
        found.bytes = max(found.bytes, process.memory_info().rss - memory)

    def ask_all_the_while() -> None:
        while not done.is_set():
            _ask(found, ask)
            look()

    with ThreadPoolExecutor(5) as pool, ExitStack() as opened:
        asking = pool.submit(ask_all_the_while)
        try:
            found.answers.update(
                pool.map(lambda each: _answer(port, others[each % len(others)]), range(count - silent))
            )
            for each in range(silent):
                visitor = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
                with suppress(OSError):
                    visitor.sendall(left_open[each % len(left_open)])
            for _ in range(10):
                _ask(found, ask)
                look()
        finally:
            done.set()
        asking.result(60)
    return found


def _ask(found: Attack, ask: Callable[[], int]) -> None:
    began = time.monotonic()
    try:
        status = ask()
    except OSError as problem:
        found.failed[repr(problem)] += 1
    else:
        if status != 200:
            found.failed[str(status)] += 1
    found.asked += 1
    found.slowest = max(found.slowest, time.monotonic() - began)


def _answer(port: int, request: bytes) -> str:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as visitor:
            visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with suppress(OSError):
                visitor.sendall(request)
            answer = visitor.recv(2**16)
    except OSError:
        return ""
    return answer.split(b" ")[1].decode("latin-1")[:3] if answer.startswith(b"HTTP/") else answer[:20].decode("latin-1")
