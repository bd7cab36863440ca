"""Draws by two rollout servers of which one is cut off: in a rollout, and in a transfer of weights. Prints JSON.

Runs as root of a network namespace of its own (`unshare --net`): one server is here, the other in a second namespace at
the end of a virtual cable, which is taken down. A server is the same file with the word `server`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from threestep.plugins.vllm.tests.fake_rollout_server import KEY, FakeServer

SECONDS = 3.0  # of --rollout_timeout
_HERE, _THERE = "10.99.0.1", "10.99.0.2"
_PORT = 8000
_SLOW = 1.0  # an answer, so that the cable is down before it comes


def main() -> None:
    if sys.argv[1:] == ["server"]:
        FakeServer(port=_PORT, host="0.0.0.0").faults["slow"] = _SLOW
        threading.Event().wait()
    os.environ["VLLM_API_KEY"] = KEY
    _shell("ip link set lo up")
    with _far_server():
        near = FakeServer()
        near.faults["slow"] = _SLOW
        print(json.dumps([_case(near, in_transfer) for in_transfer in (False, True)]))


def _case(near: FakeServer, in_transfer: bool) -> dict[str, Any]:
    from tests.unit.utils.generation.decoding.test_hf import responses
    from threestep.plugins.vllm.tests.servers.test_engine import Lent, drawn, engine_of, expected

    far = f"http://{_THERE}:{_PORT}"
    engine, actor = engine_of([], seconds=SECONDS, given=f"{near.address},{far}"), Lent()
    assert responses(drawn(engine, actor)) == expected(actor), "both are there"
    actor.step()
    if in_transfer:
        whole = actor.send
        actor.send = lambda take: whole(lambda tensors: take(_cut_behind(tensors, 2)))
    else:
        threading.Timer(_SLOW / 2, _cut).start()
    said, began = io.StringIO(), time.monotonic()
    with contextlib.redirect_stdout(said):
        got = responses(drawn(engine, actor))
    found = {"seconds": time.monotonic() - began, "same": got == expected(actor), "said": said.getvalue()}
    _shell(f"ip link set veth0 up && ip addr replace {_HERE}/24 dev veth0")
    return found


def _cut() -> None:
    _shell("ip link set veth0 down")


def _cut_behind(tensors: Iterator[Any], count: int) -> Iterator[Any]:
    for place, pair in enumerate(tensors):
        if place == count:
            _cut()
        yield pair


@contextlib.contextmanager
def _far_server() -> Iterator[None]:
    words = ["unshare", "--net", sys.executable, __file__, "server"]
    server = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])})
    inside = f"nsenter --net --target {server.pid} "
    try:
        _until(lambda: os.readlink(f"/proc/{server.pid}/ns/net") != os.readlink("/proc/self/ns/net"))
        _shell(f"ip link add veth0 type veth peer name veth1 netns {server.pid}")
        _shell(f"ip addr add {_HERE}/24 dev veth0 && ip link set veth0 up")
        _shell(f"{inside} ip addr add {_THERE}/24 dev veth1 && {inside} ip link set veth1 up")
        yield
    finally:
        server.kill()
        server.wait()


def _until(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 10.0
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


def _shell(line: str) -> None:
    subprocess.run(line, shell=True, check=True)


if __name__ == "__main__":
    main()
