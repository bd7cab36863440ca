from __future__ import annotations

import asyncio

import pytest

from threestep.plugins.vllm.servers.guard import KeyGuard


@pytest.mark.parametrize(
    "path", ["/collective_rpc", "/update_weights", "/v1/completions", "/pause", "/metrics", "/healthy"]
)
@pytest.mark.parametrize("given", [None, "Bearer wrong", "abc", "bearer abc"])
def test_nothing_answers_without_the_key(monkeypatch, path, given):
    assert status(monkeypatch, path, given) == 401


@pytest.mark.parametrize(("path", "given"), [("/collective_rpc", "Bearer abc"), ("/health", None)])
def test_what_answers(monkeypatch, path, given):
    assert status(monkeypatch, path, given) == 200


def test_no_web_socket(monkeypatch):
    assert sent(
        monkeypatch, {"type": "websocket", "path": "/v1/realtime", "headers": [(b"authorization", b"Bearer abc")]}
    ) == [{"type": "websocket.close", "code": 1008}]


def status(monkeypatch, path, given) -> int:
    headers = [] if given is None else [(b"authorization", given.encode())]
    return sent(monkeypatch, {"type": "http", "path": path, "headers": headers})[0]["status"]


def sent(monkeypatch, scope) -> list:
    monkeypatch.setenv("VLLM_API_KEY", "abc")
    found = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive():
        return {"type": "websocket.connect"}

    async def send(message):
        found.append(message)

    asyncio.run(KeyGuard(app)(scope, receive, send))
    return found
