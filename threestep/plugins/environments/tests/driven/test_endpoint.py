"""The endpoint of driven environments by raw requests: who does not know a conversation's address costs little."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from urllib.parse import urlsplit

import pytest

from tests.support.hostile import attack
from threestep.plugins.environments.driven import endpoint
from threestep.plugins.environments.driven.endpoint import ENDPOINT
from threestep.plugins.serving import threaded


@pytest.fixture
def base_url():
    """The address of a conversation whose requests are answered at once."""
    loop = asyncio.new_event_loop()
    line = ENDPOINT.open(loop)

    async def answer() -> None:
        while True:
            (await line.next()).answer.set_result({"role": "assistant", "content": "37"})

    running = loop.create_task(answer())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield line.base_url
    ENDPOINT.close(line)
    loop.call_soon_threadsafe(running.cancel)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def status_of(base_url: str, body: bytes, **headers: str) -> int:
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code


ASKED = json.dumps({"model": "any", "messages": [{"role": "user", "content": "a"}]}).encode()


def test_strangers_hold_little_and_the_conversation_goes_on(base_url):
    port = urlsplit(base_url).port
    found = attack(port, "/" + "k" * 32 + "/v1/chat/completions", lambda: status_of(base_url, ASKED), 400, 300)
    found.check(threaded.MOST_STRANGERS + 12)


def test_the_body_of_a_stranger_is_not_read(base_url, monkeypatch):
    monkeypatch.setattr(endpoint._LineHandler, "body", lambda self: pytest.fail("it was read"))
    assert status_of(base_url.replace("/v1", "x/v1"), ASKED) == 404


def test_bodies_that_are_none_are_sentences(base_url, capsys):
    for body in (b"[" * 100_000, b'{"messages":[' * 100_000, b'{"messages": %s}' % (b"9" * 5000), b"[]", b"\xff"):
        assert status_of(base_url, body) == 400
    assert status_of(base_url, ASKED) == 200 and capsys.readouterr().err == ""
