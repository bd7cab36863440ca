"""Answers that have no end, or come compressed, cost little and end soon; their threads end too."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator

import pytest

from threestep.plugins.judges import chat_endpoint, http_reward
from threestep.plugins.judges.http_reward import http_reward as server_of
from threestep.plugins.judges.judge import judge_reward
from training.utils.base.errors import ThreestepError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
SECONDS = 1.0


@contextlib.contextmanager
def sending(*parts: bytes, pause: float = 0.0) -> Iterator[str]:
    """The address of a server that answers each request with these parts, the last one again and again."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(2**16)
            for part in parts:
                connection.sendall(part)
            while pause >= 0:
                connection.sendall(parts[-1])
                time.sleep(pause)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(2**16):  # closed before all of the request was read, it would be reset
                pass

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=[listening.accept()[0]], daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


def rules(url: str, folder) -> Iterator:
    """A judge and a reward server."""
    given = {"retries": 0, "seconds": SECONDS}
    (folder / "judge.yaml").write_text(json.dumps({"model": "m", "base_url": f"{url}/v1", "rubric": "x", **given}))
    (folder / "server.yaml").write_text(json.dumps({"url": f"{url}/v1/scores", **given}))
    yield judge_reward(f"judge:{folder}/judge.yaml", "judge")
    yield server_of(f"http:{folder}/server.yaml", "server")


def failure(rule) -> str:
    """What is said of a question that has no answer."""
    with pytest.raises(ThreestepError) as found:
        rule(["p"], ["a"])
    return str(found.value)


def all_have_ended(seconds: float = 3 * SECONDS) -> bool:
    deadline = time.monotonic() + seconds
    while (
        left := [each for each in threading.enumerate() if each.name == "a request"]
    ) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


def test_an_answer_without_an_end_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_endpoint, "_MOST_BYTES", 2**20)
    monkeypatch.setattr(http_reward, "_MOST_BYTES", 2**20)
    with sending(HEAD + b"\r\n", b" " * 2**16) as url:
        for rule in rules(url, tmp_path):
            assert "the answer has more than 1,048,576 bytes" in failure(rule)
    assert all_have_ended()


@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad Request"])
def test_an_answer_that_drips_is_left(tmp_path, status):
    with sending(HEAD.replace(b"200 OK", status) + b"Content-Length: 99999\r\n\r\n", b" ", pause=0.05) as url:
        for rule in rules(url, tmp_path):
            assert "no answer within 1 seconds" in failure(rule)
        assert all_have_ended(), "while it still drips"


def test_headers_that_drip_are_left(tmp_path):
    with sending(HEAD, b"X-More: 1\r\n", pause=0.2) as url:
        for rule in rules(url, tmp_path):
            assert "no answer within 1 seconds" in failure(rule)
        assert all_have_ended(), "while it still drips"


def test_what_comes_compressed_is_not_undone(tmp_path):
    packed = gzip.compress(b" " * 2**26, 1)
    with sending(
        HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed, pause=-1
    ) as url:
        for rule in rules(url, tmp_path):
            tracemalloc.start()
            said = failure(rule)
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert "the answer is not JSON" in said and most < 2**24


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"rewards": [%s]}' % (b"9" * 5000), b'{"choices": [%s1]}' % (b"[" * 9)]
)
def test_values_on_many_levels_and_long_numbers_are_failures(tmp_path, body):
    with sending(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body, pause=-1) as url:
        for rule in rules(url, tmp_path):
            assert "has no verdict on prompt 'p'" in failure(rule)


@pytest.mark.parametrize("after", ["²", "9" * 5000, "-1", "soon"])
def test_a_wait_that_is_no_number_is_none(tmp_path, after):
    answer = f"HTTP/1.1 429 Slow\r\nRetry-After: {after}\r\nContent-Length: 0\r\n\r\n".encode("latin-1")
    with sending(answer, pause=-1) as url:
        for rule in rules(url, tmp_path):
            assert "the server answered 429: Slow" in failure(rule)
