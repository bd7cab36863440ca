"""A server with a key, by raw requests: strangers are told nothing and hold little, and whoever has the key is
served."""

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

KEY, PATH = "a-key-of-the-tests", "/v1/echo"
MOST = 8


class Echo(KeyedHandler):
    def get(self, path: str) -> None:
        self.send(200, {"path": path})

    def post(self, path: str) -> None:
        if path != PATH:
            self.refuse_method()
        self.send(200, {"got": parsed(self.body())})


@pytest.fixture
def port():
    server = KeyedServer(0, Echo, KEY, 2**16, most_connections=MOST)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server.port
    server.shutdown()
    server.server_close()
    thread.join(10)


def asked(port: int, body: bytes = b"[1]", path: str = PATH) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", path, body, {"Authorization": f"Bearer {KEY}"})
    with connection.getresponse() as answer:
        status, read = answer.status, answer.read()
    connection.close()
    assert status != 200 or json.loads(read) == {"got": json.loads(body)}
    return status


def test_strangers_hold_little_and_who_has_the_key_is_served(port):
    found = attack(port, PATH, lambda: asked(port), count=500, silent=350)
    found.check(threaded.MOST_STRANGERS + MOST + 10)
    assert found.slowest < 10.0


def raw(port: int, head: str, body: bytes = b"") -> socket.socket:
    visitor = socket.create_connection(("127.0.0.1", port), timeout=10)
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
def test_a_length_that_is_none_is_a_sentence(port, length, status, capsys):
    with raw(port, f"POST {PATH} HTTP/1.1\r\n{length}", b"[]") as visitor:
        assert visitor.recv(2**16).startswith(f"HTTP/1.1 {status} ".encode())
    assert asked(port) == 200 and capsys.readouterr().err == ""


def test_a_path_that_is_not_there_is_refused_before_its_body(port):
    with raw(port, "POST /v1/other HTTP/1.1\r\nContent-Length: 60000") as visitor, visitor.makefile("rb") as answer:
        assert answer.read().startswith(b"HTTP/1.1 405 ")  # to its end, or the body would be the next request


def test_a_body_is_asked_for_where_it_is_read_alone(port):
    expects = "Content-Length: 3\r\nExpect: 100-continue"
    with raw(port, f"POST {PATH} HTTP/1.1\r\n{expects}") as visitor:
        assert visitor.recv(2**16).startswith(b"HTTP/1.1 100 ")
        visitor.sendall(b"[7]")
        assert b'{"got": [7]}' in visitor.recv(2**16) + visitor.recv(2**16)
    with raw(port, f"POST /v1/other HTTP/1.1\r\n{expects}") as visitor:
        assert visitor.recv(2**16).startswith(b"HTTP/1.1 405 ")


def test_values_on_many_levels_and_long_numbers_are_sentences(port, capsys):
    for body in (b"[" * 30_000 + b"]" * 30_000, b'{"a":' * 10_000, b"9" * 5000):
        assert asked(port, body) == 400
    assert capsys.readouterr().err == ""


def test_more_than_are_served_at_once_are_told_so(port):
    kept = []
    for _ in range(MOST):
        kept.append(raw(port, "GET /a HTTP/1.1"))
        assert kept[-1].recv(2**16).startswith(b"HTTP/1.1 200 ")
    assert asked(port) == 503
    kept.pop().close()
    deadline = time.monotonic() + 5
    while (status := asked(port)) != 200 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert status == 200
    for each in kept:
        each.close()
