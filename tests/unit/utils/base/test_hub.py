"""A hub that does not answer is a sentence; one that is not to be asked, or whose copy is here, is not asked."""

from __future__ import annotations

import http.server
import os
import socket
import threading
import time

import pytest

from training.utils.base import hub
from training.utils.base.errors import ThreestepError
from training.utils.base.hub import check_hub


@pytest.fixture(autouse=True)
def asks(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # so that it is put back
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_SECONDS", 0.5)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def silent(monkeypatch):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(5)
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        yield


def test_no_answer_ends_in_time(silent):
    begun = time.monotonic()
    with pytest.raises(
        ThreestepError, match=r"'a/b' is not on this machine, and the hub could not .*no answer within 0.5"
    ):
        check_hub("the model 'a/b'", "models", "a/b")
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("http://127.0.0.1:9", r"could not be reached \(.*refused\); check the network and the proxy"),
        ("nowhere", r"could not be reached \(unknown url type"),
    ],
)
def test_nobody_answers(monkeypatch, endpoint, words):
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(ThreestepError, match=words):
        check_hub("the model 'a/b'", "models", "a/b")


def test_offline_and_cached_are_not_asked_and_a_copy_is_used_offline(silent, monkeypatch, tmp_path, capsys):
    (tmp_path / "cache" / "models--a--b").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(hub, "_CLIENT", "os")  # one that is imported
        check_hub("the model 'a/b'", "models", "a/b")
        patch.setenv("HF_HUB_OFFLINE", "1")
        check_hub("the model 'c/d'", "models", "c/d")
    monkeypatch.setattr(hub, "_CLIENT", "none that was imported")
    check_hub("the model 'a/b'", "models", "a/b")
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert (
        "the hub could not be reached (no answer within 0.5 seconds); using the cached copy" in capsys.readouterr().out
    )
    monkeypatch.delenv("HF_HUB_CACHE")
    (tmp_path / "hub" / "models--c--d").mkdir(parents=True)
    assert not hub._is_cached("models", "c/d")
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # where the client has it then
    assert hub._is_cached("models", "c/d")


def test_any_answer_is_one(monkeypatch):
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    asked: list[str] = []
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        check_hub("the dataset 'a/b'", "datasets", "a/b")  # it is not there, which the client says better
    assert asked == ["/api/datasets/a/b"]
