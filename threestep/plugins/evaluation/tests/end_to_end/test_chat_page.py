"""The chat page with a server and a browser: who is let in, and what an answer can make a browser fetch."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import importlib.util
import json
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from tests.support.browser import chromium, opened_browser
from threestep.plugins.evaluation import asgi, web
from threestep.plugins.evaluation.asgi import server_of
from threestep.plugins.evaluation.model import Answer
from threestep.plugins.evaluation.talk import Talk
from threestep.plugins.serving.access import Door
from threestep.plugins.serving.ports import listening
from training.utils.generation.arguments import SamplingArguments

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gradio") is None, reason="needs the package gradio: pip install gradio"
)


class EvilTalk(Talk):
    """Answers with whatever could make a browser ask another server."""

    def _stream(self, place, seed):
        at = self.columns["canary"]
        yield Answer(
            f"the answer **in bold**\n\n![a]({at}/markdown.png) <img src='{at}/html.png'> "
            f"<img srcset='{at}/set.png'>\n\n"
            f"<link rel=stylesheet href='{at}/sheet.css'><style>@import '{at}/i.css'; p {{background: url({at}/b)}}"
            f"</style><div style=\"background: url('{at}/style.png')\">x</div><script src='{at}/script.js'></script>"
            f"<iframe src='{at}/frame'></iframe><video src='{at}/video'></video><object data='{at}/o'></object>"
            f"<svg><image href='{at}/svg.png'/></svg><meta http-equiv=refresh content='0;url={at}/refresh'>"
            f"<img src=x onerror=\"fetch('{at}/fetch')\"><link rel=prefetch href='{at}/prefetch'>"
            f"<audio src='{at}/audio'></audio><input type=image src='{at}/input'>\n\n"
            f"```html\n<img src='{at}/fenced.png'>\n```\n\n[link]({at}/link) {at}/plain `<code>`\n\nthe last words",
            (1,), True,
        )  # fmt: skip


@contextlib.contextmanager
def canary():
    """(address, paths asked for) of another server."""
    asked: list[str] = []

    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_):
            """Nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def served():
    """(port, door, what another server was asked)."""
    with canary() as (elsewhere, asked):
        model = SimpleNamespace(name="a/model", reads=None, said=lambda answer: answer.text)
        door = Door()
        app = web.guarded_page(lambda: EvilTalk([model], SamplingArguments(), 1, columns={"canary": elsewhere}), door)
        with listening(0) as listener:
            server = server_of(app)
            server.install_signal_handlers = lambda: None
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
            thread.start()
            while not server.started:
                time.sleep(0.05)
            yield listener.getsockname()[1], door, asked
            server.should_exit = True
            thread.join(20)


def ask(port, method, path, body=None, **headers):
    """(status, headers, text)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    found = answer.status, dict(answer.headers), answer.read().decode("utf-8", "replace")
    connection.close()
    return found


def cookie_of(port, door):
    path = door.address(port).removeprefix(f"http://127.0.0.1:{port}")
    return ask(port, "GET", path)[1]["set-cookie"].partition(";")[0]


def test_only_the_token_opens_the_page_and_its_interface(served):
    port, door, _ = served
    cookie = cookie_of(port, door)
    status, headers, text = ask(port, "GET", "/", Cookie=cookie)
    assert status == 200 and "gradio" in text
    assert headers["content-security-policy"] == web.POLICY and "uvicorn" not in str(headers)
    call = json.dumps({"data": ["Hi"], "fn_index": 0, "session_hash": "x"})
    gets = ("/", "/config", "/gradio_api/info", "/openapi.json", "/theme.css")
    posts = ("/gradio_api/queue/join", "/gradio_api/upload")
    for path, method in (*((path, "GET") for path in gets), *((path, "POST") for path in posts)):
        body = call if method == "POST" else None
        for forged in (
            {}, {"Cookie": "threestep_000000000000=" + "0" * 48}, {"Cookie": cookie, "Host": f"evil.example:{port}"},
            {"Cookie": cookie, "Origin": "http://evil.example"},
        ):  # fmt: skip
            assert ask(port, method, path, body, **forged)[0] == 403, (path, forged)
    assert ask(port, "GET", "/?token=wrong")[0] == 403
    assert ask(port, "GET", "/config", Cookie=cookie)[0] == 200


def test_a_client_that_sends_nothing_whole_is_ended_and_many_are_bounded(served, monkeypatch):
    port, door, _ = served
    cookie = cookie_of(port, door)
    monkeypatch.setattr(asgi, "MOST_SILENT_SECONDS", 2.0)
    visitors = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(200)]
    visitors[0].sendall(b"GET / HTTP/1.1\r\nHost: ")
    ended, deadline = 0, time.monotonic() + 10
    for visitor in visitors:
        visitor.settimeout(max(0.1, deadline - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            try:
                ended += visitor.recv(1) == b""
            except ConnectionResetError:
                ended += 1
    assert ended == 200
    assert ask(port, "GET", "/", Cookie=cookie)[0] == 200


@pytest.mark.skipif(chromium() is None, reason="needs a browser: apt-get install chromium")
def test_an_answer_fetches_nothing_from_elsewhere(served):
    port, door, asked = served
    with opened_browser() as browser:
        browser.show(door.address(port))
        browser.wait("document.querySelector('#asking textarea')", 60)
        assert browser.evaluate("location.search") == ""
        setter = "Object.getOwnPropertyDescriptor(HTMLTextAreaElement.prototype, 'value').set"
        browser.evaluate(
            f"(t => {{ {setter}.call(t, 'Hi'); t.dispatchEvent(new Event('input', {{bubbles: true}})); }})"
            "(document.querySelector('#asking textarea'))"
        )
        send = "[...document.querySelectorAll('button')].find(b => b.textContent.trim() === 'Send')"
        browser.wait(send, 60)
        browser.evaluate(f"{send}.click()")
        browser.wait("document.querySelector('#columns').innerText.includes('the last words')", 60)
        browser.evaluate("document.querySelector('#columns').scrollIntoView()")
        time.sleep(2)
        assert browser.evaluate("document.querySelector('#columns strong').textContent") == "in bold"
        assert asked == []
        # Blocked ones are listed too; of Gradio's own page none is from elsewhere.
        fetched = browser.evaluate("performance.getEntriesByType('resource').map(e => e.name)")
        elsewhere = [name for name in fetched if not name.startswith((f"http://127.0.0.1:{port}/", "data:", "blob:"))]
        assert all(name.startswith("http://127.0.0.1:") for name in elsewhere), elsewhere
