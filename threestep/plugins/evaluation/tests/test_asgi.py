"""A door before an ASGI application, without a server; threestep/plugins/evaluation/tests/test_web.py has one."""

from __future__ import annotations

import asyncio
import http.client
import threading

import pytest

from tests.support.hostile import attack
from threestep.plugins.evaluation import asgi
from threestep.plugins.evaluation.asgi import GuardedApp, server_of
from threestep.plugins.serving.access import Door
from threestep.plugins.serving.ports import listening

TOKEN = "f" * 48


async def page(scope, receive, send):
    theirs = [(b"content-security-policy", b"default-src *"), (b"x-gradio", b"1")]
    await send({"type": "http.response.start", "status": 200, "headers": theirs})
    await send({"type": "http.response.body", "body": b"page"})


def answer(kind="http", path="/", query="", **headers):
    """(status, headers, body), or the last message to a web socket."""
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "websocket.connect"}

    given = [(name.encode(), value.encode("latin-1")) for name, value in {"host": "127.0.0.1:1", **headers}.items()]
    scope = {"type": kind, "method": "GET", "path": path, "raw_path": path.encode(), "query_string": query.encode()}
    asyncio.run(GuardedApp(page, Door(TOKEN), "default-src 'self'")({**scope, "headers": given}, receive, send))
    if kind == "websocket":
        return sent[-1]
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}, sent[1]["body"]


def test_a_page_is_behind_the_door_with_a_policy_of_ours():
    status, headers, body = answer()
    assert (status, headers["content-security-policy"]) == (403, "default-src 'none'; frame-ancestors 'none'")
    assert b"needs its token" in body and headers["content-length"] == str(len(body))
    assert answer(query=f"token={TOKEN}", host="evil.example")[0] == 403
    status, headers, _ = answer(query=f"token={TOKEN}")
    cookie = headers["set-cookie"].partition(";")[0]
    assert status == 303 and headers["location"] == "/"
    status, headers, body = answer(cookie=cookie)
    assert (status, body, headers["content-security-policy"]) == (200, b"page", "default-src 'self'")
    assert headers["x-gradio"] == "1" and headers["referrer-policy"] == "no-referrer"
    assert headers["x-dns-prefetch-control"] == "off"
    assert answer(cookie=cookie, origin="http://evil.example")[0] == 403


def test_a_connection_that_lost_its_place_is_not_let_in_and_others_are_while_there_is_room(monkeypatch):
    monkeypatch.setattr(asgi, "MOST_CONNECTIONS", 2)
    app = GuardedApp(page, Door(TOKEN), "")
    app.strangers = dict.fromkeys("abc")
    assert [app._lets_in(each) for each in ("a", "gone", "b", "c", "a")] == [True, False, True, False, True]
    assert app.known == {"a", "b"} and list(app.strangers) == ["c"]


def test_no_web_socket_is_opened():
    assert answer("websocket") == {"type": "websocket.close", "code": 1008}


def test_the_application_starts_and_ends_with_the_server():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    asyncio.run(GuardedApp(app, Door(), "")({"type": "lifespan"}, None, None))
    assert seen == ["lifespan"]


def test_strangers_make_room_for_each_other_and_who_has_the_token_is_served():
    pytest.importorskip("uvicorn", reason="Gradio, which brings uvicorn along, is not installed")
    door, socket = Door(TOKEN), listening(0)
    server = server_of(GuardedApp(page, door, "default-src 'self'"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    port = socket.getsockname()[1]

    def get(target, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", target, headers=headers)
        with connection.getresponse() as answer:
            answer.read()
        connection.close()
        return answer

    cookie = get(f"/?token={TOKEN}").getheader("set-cookie").partition(";")[0]
    attack(port, "/", lambda: get("/", Cookie=cookie).status, count=1600, silent=1400).check(most_threads=10)
    server.should_exit = server.force_exit = True
    thread.join(20)
    assert not thread.is_alive()
