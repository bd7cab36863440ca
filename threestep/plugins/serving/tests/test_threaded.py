"""Bounds on visitors' threads and time, and a server with a key, by raw requests: strangers are told nothing."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time

import pytest

from tests.support.hostile import attack
from threestep.plugins.serving import threaded
from threestep.plugins.serving.keyed import KeyedHandler, KeyedServer, parsed
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


KEY, ECHO = "a-key-of-the-tests", "/v1/echo"
MOST = 8


class Echo(KeyedHandler):
    def get(self, path: str) -> None:
        self.send(200, {"path": path})

    def post(self, path: str) -> None:
        if path != ECHO:
            self.refuse_method()
        self.send(200, {"got": parsed(self.body())})


@pytest.fixture
def keyed_port():
    server = KeyedServer(0, Echo, KEY, 2**16, most_connections=MOST)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server.port
    server.shutdown()
    server.server_close()
    thread.join(10)


def asked(keyed_port: int, body: bytes = b"[1]", path: str = ECHO) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", keyed_port, timeout=20)
    connection.request("POST", path, body, {"Authorization": f"Bearer {KEY}"})
    with connection.getresponse() as answer:
        status, read = answer.status, answer.read()
    connection.close()
    assert status != 200 or json.loads(read) == {"got": json.loads(body)}
    return status


def test_strangers_hold_little_and_who_has_the_key_is_served(keyed_port):
    found = attack(keyed_port, ECHO, lambda: asked(keyed_port), count=500, silent=350)
    found.check(threaded.MOST_STRANGERS + MOST + 10)
    assert found.slowest < 10.0


def raw(keyed_port: int, head: str, body: bytes = b"") -> socket.socket:
    visitor = socket.create_connection(("127.0.0.1", keyed_port), timeout=10)
    visitor.sendall(f"{head}\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode("latin-1") + body)
    return visitor


@pytest.mark.parametrize(
    ("length", "status"),
    [
        ("Content-Length: ²", 411),
        (f"Content-Length: {'9' * 5000}", 411),
        ("Content-Length: -1", 411),
        ("Content-Length: 1_0", 411),
        ("Content-Length: 2\r\nContent-Length: 2", 411),
        ("Content-Length: 2\r\nTransfer-Encoding: chunked", 411),
        ("Content-Length: 65537", 413),
        (f"Content-Length: {'9' * 18}", 413),
    ],
)
def test_a_length_that_is_none_is_a_sentence(keyed_port, length, status, capsys):
    with raw(keyed_port, f"POST {ECHO} HTTP/1.1\r\n{length}", b"[]") as visitor:
        assert visitor.recv(2**16).startswith(f"HTTP/1.1 {status} ".encode())
    assert asked(keyed_port) == 200 and capsys.readouterr().err == ""


def test_a_path_that_is_not_there_is_refused_before_its_body(keyed_port):
    with (
        raw(keyed_port, "POST /v1/other HTTP/1.1\r\nContent-Length: 60000") as visitor,
        visitor.makefile("rb") as answer,
    ):
        assert answer.read().startswith(b"HTTP/1.1 405 ")  # to its end, or the body would be the next request


def test_a_body_is_asked_for_where_it_is_read_alone(keyed_port):
    expects = "Content-Length: 3\r\nExpect: 100-continue"
    with raw(keyed_port, f"POST {ECHO} HTTP/1.1\r\n{expects}") as visitor:
        assert visitor.recv(2**16).startswith(b"HTTP/1.1 100 ")
        visitor.sendall(b"[7]")
        assert b'{"got": [7]}' in visitor.recv(2**16) + visitor.recv(2**16)
    with raw(keyed_port, f"POST /v1/other HTTP/1.1\r\n{expects}") as visitor:
        assert visitor.recv(2**16).startswith(b"HTTP/1.1 405 ")


def test_values_on_many_levels_and_long_numbers_are_sentences(keyed_port, capsys):
    for body in (b"[" * 30_000 + b"]" * 30_000, b'{"a":' * 10_000, b"9" * 5000):
        assert asked(keyed_port, body) == 400
    assert capsys.readouterr().err == ""


def test_more_than_are_served_at_once_are_told_so(keyed_port):
    kept = []
    for _ in range(MOST):
        kept.append(raw(keyed_port, "GET /a HTTP/1.1"))
        assert kept[-1].recv(2**16).startswith(b"HTTP/1.1 200 ")
    assert asked(keyed_port) == 503
    kept.pop().close()
    deadline = time.monotonic() + 5
    while (status := asked(keyed_port)) != 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert status == 200
    for each in kept:
        each.close()
