"""A page that follows a run: what grew is sent and nothing else, to this machine alone."""

from __future__ import annotations

import http.client
import json
import threading

import pytest

from training.utils.report import live
from training.utils.report import page as page_module
from training.utils.report.live import LivePage, answer_to, make_server
from training.utils.run.errors import ThreestepError

HOST = "127.0.0.1:1"


class Clock:
    """Stands, unless a question is asked: long after the one before it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def asked(followed: LivePage, path: str, host: str = HOST) -> tuple[int, str, str]:
    followed._clock.now += 1000.0
    return answer_to(followed, path, host)


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    monkeypatch.setattr(page_module, "library", lambda: "var d3 = {};")


def append(folder, **line) -> None:
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def test_only_what_changed_is_sent(sft_run):
    folder = sft_run()
    followed = LivePage([folder], Clock())
    status, _, text = asked(followed, "/")
    assert status == 200 and '"live">{"version":1,"seconds":2.0}' in text
    assert asked(followed, "/update?have=1")[0] == 204
    append(folder, step=4, seconds=12.0, **{"train/loss": 1.25})
    status, _, text = asked(followed, "/update?have=1")
    update = json.loads(text)
    assert (status, update["version"], update["reload"]) == (200, 2, False)
    assert set(update["charts"]) == {"sft-0"} and update["charts"]["sft-0"]["lines"][0]["ys"][-1] == 1.25
    assert {"sft", "time", "top"} <= set(update["parts"]) and "settings" not in update["parts"]
    assert asked(followed, "/update?have=2")[0] == 204


def test_a_new_chart_or_another_program_is_loaded_anew(sft_run):
    folder = sft_run()
    followed = LivePage([folder], Clock())
    append(folder, step=4, seconds=12.0, **{"train/token_accuracy": 0.5})
    for have in (1, 99):
        update = json.loads(asked(followed, f"/update?have={have}")[2])
        assert update["reload"] and update["parts"] == {}


def test_only_what_was_appended_is_read(sft_run):
    folder = sft_run()
    followed = LivePage([folder], Clock())
    (lines,) = followed._reader._metrics.values()
    taken = []
    lines.take = taken.append
    append(folder, step=4, seconds=12.0, **{"train/loss": 1.25})
    asked(followed, "/update?have=1")
    assert [line["step"] for line in taken] == [4]


def test_looking_takes_a_tenth_of_the_time_at_most(sft_run, monkeypatch):
    folder, now = sft_run(), [0.0]
    read = live.parts_of

    def slow(runs):
        now[0] += 3.0
        return read(runs)

    monkeypatch.setattr(live, "parts_of", slow)
    followed = LivePage([folder], lambda: now[0])
    looked = 0
    for _ in range(100):
        now[0] += 1.0
        before = now[0]
        followed.update(0)
        looked += now[0] > before
    assert looked == 3  # 33 s between two ends of 3 s each


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [("/", "evil.example:8900", 403), ("/", "", 403), ("/update?have=1", "evil.example", 403),
     ("/", "localhost:1", 200), ("/../config.yaml", HOST, 404), ("/update", HOST, 204), ("/update?have=-1", HOST, 204),
     ("/update?have=" + "9" * 5000, HOST, 204), ("/update?have=٣", HOST, 204)],
)  # fmt: skip
def test_requests_that_are_not_ours(sft_run, path, host, status):
    assert answer_to(LivePage([sft_run()], Clock()), path, host)[0] == status


def test_a_folder_that_is_gone_is_a_sentence(sft_run):
    folder = sft_run()
    followed = LivePage([folder], Clock())
    for path in folder.iterdir():
        path.unlink()
    status, _, text = asked(followed, "/")
    assert status == 503 and "holds no run" in text


def test_it_is_served_on_the_loopback_address(sft_run):
    server = make_server(LivePage([sft_run()]), 0)
    address, port = server.server_address[:2]
    assert address == "127.0.0.1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        asked = http.client.HTTPConnection(address, port, timeout=10)
        asked.request("GET", "/")
        answer = asked.getresponse()
        assert answer.status == 200 and answer.headers["Cache-Control"] == "no-store"
        assert b"Threestep" in answer.read()
        with pytest.raises(ThreestepError, match=f"--port {port}: .*; give another port, or 0 for a free one"):
            make_server(LivePage([sft_run("b")]), port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
