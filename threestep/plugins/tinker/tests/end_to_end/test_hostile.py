"""2,000 hostile requests to every server of this project, 1,500 of them silent ones that stay: none is answered, memory
and threads are bounded, and who has the key is served all the while. The chat page's: evaluation/tests/test_web.py;
vLLM's: vllm/tests/vllm."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

from tests.support.hostile import attack
from tests.support.saved_models import save_pair
from tests.support.tiny_models import tiny_causal_lm, tiny_scalar_model
from threestep.plugins.environments.driven.endpoint import ENDPOINT
from threestep.plugins.report.live import LivePage, make_server
from threestep.plugins.serve.endpoint.reward_server import SCORES, RewardServer, load_served_reward
from threestep.plugins.serve.endpoint.web_server import CHAT
from threestep.plugins.serving.access import Door
from threestep.plugins.serving.threaded import MOST_STRANGERS
from training.utils.data.rows.arguments import ChatArguments

pytestmark = [pytest.mark.end_to_end, pytest.mark.long, pytest.mark.timeout(900)]
KEY = "tml-a-key-of-the-tests"
HELD = MOST_STRANGERS + 30  # threads: those of strangers, of who has the key, and of the test
# A port, a path that is answered with the key, and a request with it.
Served = tuple[int, str, Callable[[], int]]


@contextlib.contextmanager
def running(server) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join(20)


def asking(port: int, path: str, body: object = None, **headers: str) -> Callable[[], int]:
    def ask() -> int:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            data = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, data, headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status

    return ask


@contextlib.contextmanager
def model(folder, tokenizer) -> Iterator[Served]:
    from threestep.plugins.serve.endpoint.model import load_served
    from threestep.plugins.serve.tests.endpoint import conftest

    served = load_served(save_pair(folder / "m", tokenizer, tiny_causal_lm), "tiny", conftest.SAMPLING, ChatArguments())
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    with conftest.serving(served) as client:
        port = client.server.port
        yield port, CHAT, asking(port, CHAT, body, Authorization=f"Bearer {conftest.KEY}")


@contextlib.contextmanager
def reward(folder, tokenizer) -> Iterator[Served]:
    served = load_served_reward(save_pair(folder / "rm", tokenizer, tiny_scalar_model), "rm", None, ChatArguments())
    body = {"prompts": ["Human: Hi Assistant:"], "responses": [" yes"]}
    with running(RewardServer(0, served, KEY, 2**16)) as port:
        yield port, SCORES, asking(port, SCORES, body, Authorization=f"Bearer {KEY}")


@contextlib.contextmanager
def training(folder, tokenizer) -> Iterator[Served]:
    pytest.importorskip("tinker", reason="the package tinker is not installed")
    from tests.support import training_server

    server = training_server.Running(folder)
    path, port = "/api/v1/create_session", server.server.port
    yield port, path, asking(port, path, {}, **{"x-api-key": training_server.KEY, "Content-Type": "application/json"})
    server.close()


@contextlib.contextmanager
def driven(folder, tokenizer) -> Iterator[Served]:
    loop = asyncio.new_event_loop()
    line = ENDPOINT.open(loop)

    async def answer() -> None:
        while True:
            (await line.next()).answer.set_result({"role": "assistant", "content": "37"})

    task = loop.create_task(answer())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    address = urlsplit(line.base_url)
    body = {"model": "any", "messages": [{"role": "user", "content": "a"}]}
    ask = asking(address.port, f"{address.path}/chat/completions", body)
    yield address.port, f"/{'k' * 32}/v1/chat/completions", ask
    ENDPOINT.close(line)
    loop.call_soon_threadsafe(task.cancel)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


@contextlib.contextmanager
def live_page(folder, tokenizer) -> Iterator[Served]:
    (folder / "config.yaml").write_text("seed: 1\n")
    (folder / "metrics.jsonl").write_text('{"step": 1, "seconds": 1.0, "train/loss": 2.0}\n')
    door = Door()
    with running(make_server(LivePage([folder]), 0, door)) as port:
        yield port, "/", asking(port, "/", Cookie=cookie_of(door, port))


def cookie_of(door: Door, port: int) -> str:
    """What the printed address gives to a browser."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", door.address(port).partition(str(port))[2])
        return connection.getresponse().getheader("Set-Cookie", "").partition(";")[0]


@pytest.mark.parametrize("opened", [model, reward, training, driven, live_page], ids=lambda each: each.__name__)
def test_two_thousand_hostile_requests(opened, tmp_path, tiny_tokenizer, capsys):
    with opened(tmp_path, tiny_tokenizer) as (port, path, ask):
        assert ask() == 200
        found = attack(port, path, ask)
        found.check(HELD)
        assert found.asked > 20 and found.slowest < 30.0
    assert "Traceback" not in capsys.readouterr().err


def test_weights_reach_a_server_past_two_thousand_silent_connections():
    from threestep.plugins.vllm.tests.fake_rollout_server import FakeServer
    from threestep.plugins.vllm.tests.servers.test_sending import send

    class Crowded(FakeServer):
        def on_update_weights(self, body):
            where = body["update_info"]
            with contextlib.ExitStack() as crowd:
                for number in range(2000):
                    each = crowd.enter_context(socket.create_connection((where["host"], where["port"])))
                    with contextlib.suppress(OSError):
                        each.sendall(b"x" * (number % 3))
                return super().on_update_weights(body)

    server, began = Crowded(), time.monotonic()
    assert not send([server], seconds=30.0).failures and server.transfers == 1
    assert time.monotonic() - began < 25.0
    server.stop()
