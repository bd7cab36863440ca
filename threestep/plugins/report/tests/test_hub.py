"""The upload of a finished model, against a hub of this machine."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from threestep.plugins.report.hub import open_repository, publish_model
from training.utils.base.errors import ThreestepError

SETTINGS = {"push_to_hub": True, "hub_model_id": "me/mine", "hub_private_repo": True}


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks of the hub for a repository and a commit of small files."""

    asked: list[tuple[str, Any]]

    def do_GET(self) -> None:
        self._answer({"sha": "0" * 40, "id": "me/mine", "siblings": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        lines = [json.loads(line) for line in body.splitlines()]
        self.asked.append((self.path, lines))
        if "preupload" in self.path:
            own = {"uploadMode": "regular", "shouldIgnore": False}
            return self._answer({"files": [{"path": file["path"], **own} for file in lines[0]["files"]]})
        place = {"url": "http://127.0.0.1/me/mine", "id": "me/mine", "commitUrl": "http://127.0.0.1/me/mine/commit/0"}
        self._answer({**place, "errors": [], "warnings": [], "success": True, "commitOid": "0" * 40})

    def _answer(self, content: dict[str, Any]) -> None:
        words = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(words)))
        self.end_headers()
        self.wfile.write(words)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch) -> Iterator[Any]:
    from huggingface_hub import HfApi

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    Hub.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield HfApi(endpoint=f"http://127.0.0.1:{server.server_port}", token="hf_of_a_test")
    server.shutdown()


def finished(folder) -> Any:
    (folder / "model").mkdir(parents=True)
    (folder / "config.yaml").write_text("model_name_or_path: acme/base\ndata_path: [embedded]\nzero_stage: 0\n")
    return folder


def test_a_repository_is_made_and_the_model_is_committed(hub, tmp_path, capsys):
    open_repository(SETTINGS, hub)
    publish_model(finished(tmp_path), SETTINGS, hub)
    assert capsys.readouterr().out == "uploaded the model to me/mine\n"
    (made,) = [lines[0] for path, lines in Hub.asked if path == "/api/repos/create"]
    assert (made["name"], made["organization"], made["visibility"]) == ("mine", "me", "private")
    (commit,) = [lines for path, lines in Hub.asked if "/commit/" in path]
    files = {line["value"]["path"]: line["value"]["content"] for line in commit if line["key"] == "file"}
    assert b"base_model: acme/base" in base64.b64decode(files["README.md"])


def test_without_a_name_it_is_the_output_folders_in_the_account_that_is_logged_in(hub, tmp_path, capsys, monkeypatch):
    folder = finished(tmp_path / "Qwen2-0.5B-SFT")
    settings = {"push_to_hub": True, "hub_model_id": None, "hub_private_repo": None, "output_dir": str(folder)}
    monkeypatch.setattr(type(hub), "whoami", lambda _self: {"name": "me"})
    open_repository(settings, hub)
    publish_model(folder, settings, hub)
    assert capsys.readouterr().out == "uploaded the model to me/Qwen2-0.5B-SFT\n"
    (made,) = [lines[0] for path, lines in Hub.asked if path == "/api/repos/create"]
    assert made["name"] == "Qwen2-0.5B-SFT" and made.get("organization") is None
    assert any(path.startswith("/api/models/me/Qwen2-0.5B-SFT/commit/") for path, _ in Hub.asked)
    with pytest.raises(ThreestepError, match="the repository Qwen2-0.5B-SFT .AttributeError.*; log in with `hf auth"):
        open_repository(settings, object())


def test_nothing_is_asked_unless_it_is_wanted(tmp_path):
    open_repository({"push_to_hub": False}, object())
    (tmp_path / "model").mkdir()
    publish_model(tmp_path, {"push_to_hub": False}, object())
    publish_model(tmp_path / "without_a_model", SETTINGS, object())


def test_a_hub_that_refuses_is_a_mistake_before_training_and_a_line_after_it(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(ThreestepError, match="^--push_to_hub cannot open the repository me/mine .AttributeError"):
        open_repository(SETTINGS, object())
    (tmp_path / "model").mkdir()
    publish_model(tmp_path, SETTINGS, object())
    assert f"hf upload me/mine {tmp_path}/model" in capsys.readouterr().out
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ThreestepError, match="HF_HUB_OFFLINE is set"):
        open_repository(SETTINGS, object())
