"""The web page without Gradio, and the door before its application, without a server and with one."""

from __future__ import annotations

import asyncio
import http.client
import sys
import threading
from pathlib import Path

import pytest

from tests.support.hostile import attack
from threestep.plugins.evaluation import asgi, web
from threestep.plugins.evaluation.asgi import GuardedApp, server_of
from threestep.plugins.evaluation.talk import Talk
from threestep.plugins.serving.access import Door
from threestep.plugins.serving.ports import listening
from training.utils.base.errors import ThreestepError
from training.utils.generation.arguments import SamplingArguments


def test_a_missing_package_is_one_sentence(asked, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ThreestepError, match="--web needs the package gradio, which is not installed; install it"):
        web.serve(lambda: Talk([asked], SamplingArguments(), 1), 7860, print)


def test_it_listens_on_this_machine_alone_and_says_where_it_cannot(monkeypatch):
    said, served = [], []
    monkeypatch.setattr(web, "guarded_page", lambda new_talk, door: "the page behind its door")

    class Server:
        def run(self, sockets):
            served.append(sockets[0].getsockname())
            with pytest.raises(ThreestepError, match=f"--web_port {served[0][1]}: .* in use; choose another port"):
                web.serve(None, served[0][1], said.append)

    monkeypatch.setattr(web, "server_of", lambda app: Server())
    web.serve(None, 0, said.append)
    assert served[0][0] == "127.0.0.1" and said[0].startswith(f"http://127.0.0.1:{served[0][1]}/?token=")
    assert "#asking { position: fixed; left: 0; right: 0; bottom: 0" in web._STYLE  # what one types stays on a phone


def test_lines_become_answers_and_notes(asked):
    talk = Talk([asked], SamplingArguments(max_new_tokens=3), 1)
    assert list(web.respond(talk, "/temperature 0")) == ["temperature is 0.0"]
    assert set(web.respond(talk, "Hi")) == {""}
    shown = web._columns(talk, "")
    assert [entry["role"] for entry in shown[0]] == ["user", "assistant"]
    assert list(web.respond(talk, "/nothing"))[0].startswith("unknown command /nothing")
    assert list(web.respond(talk, "  ")) == []
    assert list(web.respond(talk, "/save x")) == ["/save is available only in the terminal"]
    assert list(web.respond(talk, "/quit")) == ["to end the chat, close the page and stop the program"]


def test_controls_set_what_they_stand_for(asked):
    talk = Talk([asked], SamplingArguments(max_new_tokens=3), 1)
    for name, value in (("temperature", 0.5), ("top_p", 0.9), ("top_k", 7), ("max_new_tokens", 5), ("seed", 9)):
        assert web.change(talk, name, value) == ""
    assert web.values_of(talk) == ["", 0.5, 0.9, 7, 5, 9]
    assert web.change(talk, "temperature", -1).startswith("--temperature expects 0 or more, got -1")
    assert talk.sampling.temperature == 0.5
    talk.ask("Hi")
    assert web.change(talk, "system", "") == "" and talk.turns  # left as it was
    assert web.change(talk, "system", "Be short") == "" and not talk.turns and talk.system == "Be short"


def test_the_page_has_a_title_controls_and_a_stop(asked):
    pytest.importorskip("gradio", reason="needs the package gradio: pip install gradio")
    page = web.build_page(lambda: Talk([asked], SamplingArguments(), 1))
    parts = page.config["components"]
    assert page.title == f"{Path(asked.name).name} · Threestep"
    labels = {str(part["props"].get("label") or part["props"].get("value")) for part in parts}
    assert {"Stop", "Send", "Answer again", "New conversation", "seed", "maximum tokens per answer"} <= labels
    assert any(function.get("cancels") for function in page.config["dependencies"])


TOKEN = "f" * 48


async def plain_page(scope, receive, send):
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
    asyncio.run(GuardedApp(plain_page, Door(TOKEN), "default-src 'self'")({**scope, "headers": given}, receive, send))
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
    app = GuardedApp(plain_page, Door(TOKEN), "")
    app.strangers = dict.fromkeys("abc")
    assert [app._lets_in(each) for each in ("a", "gone", "b", "c", "a")] == [True, False, True, False, True]
    assert app.known == {"a", "b"} and list(app.strangers) == ["c"]


def test_no_web_socket_is_opened_and_the_application_starts_and_ends_with_the_server():
    assert answer("websocket") == {"type": "websocket.close", "code": 1008}
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    asyncio.run(GuardedApp(app, Door(), "")({"type": "lifespan"}, None, None))
    assert seen == ["lifespan"]


def test_strangers_make_room_for_each_other_and_who_has_the_token_is_served():
    pytest.importorskip("uvicorn", reason="Gradio, which brings uvicorn along, is not installed")
    door, socket = Door(TOKEN), listening(0)
    server = server_of(GuardedApp(plain_page, door, "default-src 'self'"))
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
