"""A page that follows a run: what grew is sent and nothing else, to this machine alone."""

from __future__ import annotations

import http.client
import json
import threading

import pytest

from threestep.plugins.report import live
from threestep.plugins.report.live import LivePage, answer_to, make_server
from threestep.plugins.report.pages import page as page_module
from threestep.plugins.serving.access import Door
from training.utils.base.errors import ThreestepError


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def followed(sft_run, clock) -> LivePage:
    return LivePage([sft_run()], lambda: clock[0])


@pytest.fixture
def asked(followed, clock):
    """Each question long after the one before it."""

    def ask(path: str) -> tuple[int, str, str]:
        clock[0] += 1000.0
        return answer_to(followed, path)

    return ask


@pytest.fixture(autouse=True)
def _library(monkeypatch):
    monkeypatch.setattr(page_module, "library", lambda: "var d3 = {};")


def append(tmp_path, name: str, value: float) -> None:
    with open(tmp_path / "sft" / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": 4, "seconds": 12.0, name: value}) + "\n")


def test_only_what_changed_is_sent(asked, tmp_path):
    status, _, text = asked("/")
    assert status == 200 and '"live">{"version":1,"seconds":2.0}' in text
    assert asked("/update?have=1")[0] == 204
    append(tmp_path, "train/loss", 1.25)
    status, _, text = asked("/update?have=1")
    update = json.loads(text)
    assert (status, update["version"], update["reload"]) == (200, 2, False)
    assert set(update["charts"]) == {"sft-0"} and update["charts"]["sft-0"]["lines"][0]["ys"][-1] == 1.25
    assert {"results", "sft", "time", "run"} <= set(update["parts"]) and "settings" not in update["parts"]
    assert asked("/update?have=2")[0] == 204


def test_a_new_chart_or_another_program_is_loaded_anew(asked, tmp_path):
    append(tmp_path, "train/token_accuracy", 0.5)
    for have in (1, 99):
        update = json.loads(asked(f"/update?have={have}")[2])
        assert update["reload"] and update["parts"] == {}


def test_only_what_was_appended_is_read(asked, followed, tmp_path):
    (lines,) = followed._reader._metrics.values()
    taken = []
    lines.take = taken.append
    append(tmp_path, "train/loss", 1.25)
    asked("/update?have=1")
    assert [line["step"] for line in taken] == [4]


def test_looking_takes_a_tenth_of_the_time_at_most(sft_run, clock, monkeypatch):
    read = live.parts_of

    def slow(runs):
        clock[0] += 3.0
        return read(runs)

    monkeypatch.setattr(live, "parts_of", slow)
    followed, looked = LivePage([sft_run()], lambda: clock[0]), 0
    for _ in range(100):
        clock[0] += 1.0
        before = clock[0]
        followed.update(0)
        looked += clock[0] > before
    assert looked == 3  # 33 s between two ends of 3 s each


@pytest.mark.parametrize(
    ("path", "status"),
    [("/../config.yaml", 404), ("/update", 204), ("/update?have=-1", 204), ("/update?have=" + "9" * 5000, 204),
     ("/update?have=٣", 204)],
)  # fmt: skip
def test_requests_that_are_not_ours(followed, path, status):
    assert answer_to(followed, path)[0] == status


@pytest.fixture
def served(sft_run):
    """The port of a page that is served, and its door."""
    door = Door()
    server = make_server(LivePage([sft_run()]), 0, door)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server.server_address[1], door
    server.shutdown()
    server.server_close()
    thread.join(10)


def get(port, path, **headers):
    """(status, headers, text) of a request with exactly these headers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest("GET", path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, dict(answer.headers), answer.read().decode()
    connection.close()
    return found


def test_it_is_served_to_whoever_has_the_token_of_its_address(served):
    port, door = served
    status, headers, text = get(port, door.address(port).removeprefix(f"http://127.0.0.1:{port}"))
    assert (status, headers["Location"], text) == (303, "/", "")
    cookie = headers["Set-Cookie"].partition(";")[0]
    status, headers, text = get(port, "/", Cookie=cookie)
    assert status == 200 and "Threestep" in text and headers["Cache-Control"] == "no-store"
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"] and headers["Server"].strip() == "Threestep"
    assert get(port, "/update?have=1", Cookie=cookie)[0] == 204


def test_it_is_served_to_nobody_else(served):
    port, door = served
    cookie = dict(door.judge("GET", f"/?{door.address(port).partition('?')[2]}", [("Host", "localhost")]).headers)
    given = {"Cookie": cookie["Set-Cookie"].partition(";")[0]}
    for path in ("/", "/update?have=0", "/?token=wrong"):  # serving/tests/test_serving.py has every forgery
        for headers in ({}, {**given, "Host": f"evil.example:{port}"}, {**given, "Origin": "http://evil.example"}):
            status, _, text = get(port, path, **headers)
            assert status == 403 and "loss" not in text, (path, headers)


def test_a_port_that_is_taken_is_a_sentence(served, sft_run):
    with pytest.raises(ThreestepError, match=f"--port {served[0]}: .*; choose another port, or 0 for a free one"):
        make_server(LivePage([sft_run("b")]), served[0], Door())
