"""The bounds on visitors' threads and time, with sockets of this machine."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from threestep.plugins.serving import threaded
from threestep.plugins.serving.threaded import BoundedHandler, BoundedServer

BODY = b"x" * 2**24  # more than the buffers of a socket hold


class Page(BoundedHandler):
    def do_GET(self) -> None:
        if self.path == "/fails":
            raise ValueError("a fault of the program")
        self.send_response(200)
        self.end_headers()
        self.wfile.write(BODY if self.path == "/large" else b"page")


@pytest.fixture
def port():
    """Of a server whose visitors are all strangers."""
    server = BoundedServer(0, Page, seconds=1.0)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join(10)


def opened(port: int, text: bytes = b"") -> socket.socket:
    visitor = socket.create_connection(("127.0.0.1", port), timeout=10)
    if text:
        visitor.sendall(text)
    return visitor


def ended(visitor: socket.socket) -> bool:
    """Whether the server closes the connection without an answer."""
    try:
        return visitor.recv(1) == b""
    except ConnectionResetError:
        return True


def read(port: int) -> bytes:
    visitor = opened(port, b"GET / HTTP/1.0\r\n\r\n")
    text = b""
    while block := visitor.recv(2**16):
        text += block
    return text


def test_a_client_that_sends_a_byte_now_and_then_is_ended(port):
    slow, began = opened(port, b"GET / HTTP/1.1\r\n"), time.monotonic()
    with pytest.raises(OSError):
        while time.monotonic() - began < 8:
            slow.sendall(b"a")
            time.sleep(0.1)
    assert 0.9 < time.monotonic() - began < 5


def test_a_client_that_does_not_read_is_ended(port):
    before = threading.active_count()
    visitor = opened(port, b"GET /large HTTP/1.0\r\n\r\n")
    deadline = time.monotonic() + 8
    time.sleep(0.5)
    assert threading.active_count() == before + 1
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() == before
    visitor.close()


def test_the_silent_hold_few_threads_and_the_oldest_of_them_make_room(port, monkeypatch):
    monkeypatch.setattr(threaded, "MOST_STRANGERS", 20)
    before = threading.active_count()
    visitors = [opened(port) for _ in range(200)]
    assert read(port).endswith(b"page")
    assert threading.active_count() - before <= 20 + 1  # the thread of the page that was read may not have ended
    assert all(ended(visitor) for visitor in visitors[:-20])
    assert threading.active_count() > before  # the last ones are heard
    deadline = time.monotonic() + 8
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() == before and all(ended(visitor) for visitor in visitors)


def test_a_system_without_threads_costs_no_room(port, monkeypatch, capsys):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threaded, "MOST_STRANGERS", 5)
    with monkeypatch.context() as without:
        without.setattr(threading.Thread, "start", refused)
        assert all(ended(opened(port)) for _ in range(400))
    assert read(port).endswith(b"page") and "can't start new thread" in capsys.readouterr().err


def test_a_long_head_is_not_kept(port):
    with opened(port, b"GET / HTTP/1.1\r\n") as visitor, pytest.raises(OSError):
        for _ in range(100):
            visitor.sendall(b"a: " + b"b" * 60_000 + b"\r\n")
            time.sleep(0.005)


def test_a_fault_of_the_program_is_printed_and_a_visitor_that_left_is_not(port, capsys):
    visitor = opened(port, b"GET /large HTTP/1.0\r\n\r\n")
    visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    visitor.close()
    assert ended(opened(port, b"GET /fails HTTP/1.0\r\n\r\n"))
    time.sleep(0.2)
    said = capsys.readouterr().err
    assert "a fault of the program" in said and "ConnectionResetError" not in said and "BrokenPipe" not in said
