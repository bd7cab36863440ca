"""Who sends by NCCL, who meets whom, and that tensors of a GPU go from there: by gloo, or on a device that pretends."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import pytest
import torch

from tests.support.cuda_stand_in.device import counted
from threestep.plugins.vllm.servers import groups
from threestep.plugins.vllm.servers.client import ServerClient, ServerFailure
from threestep.plugins.vllm.servers.groups import End, WeightGroup, chosen_way, met, own_end
from threestep.plugins.vllm.servers.protocol import GLOO, NCCL, TCP
from threestep.plugins.vllm.tests.fake_rollout_server import KEY, FakeServer
from threestep.plugins.vllm.tests.servers.test_engine import Lent, drawn, engine_of, expected, responses

# Runs where the pretended GPU is.


def from_gpu_to_gpu() -> dict[str, Any]:
    """Send weights of a GPU to a server by a group whose ends are a GPU's, and hand its bytes over in this process."""
    from threestep.plugins.vllm.servers.groups import own_device
    from threestep.plugins.vllm.servers.sending import Target, send_weights
    from threestep.plugins.vllm.weights import BitSums

    hands: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    class Hand:
        device = own_device()

        def __init__(self, gives: bool) -> None:
            self.gives = gives

        def broadcast(self, data: torch.Tensor, seconds: float) -> None:
            assert data.device == self.device and data.dtype == torch.uint8
            if self.gives:
                hands.put(data.clone())
            else:
                data.copy_(hands.get(timeout=seconds))

        def close(self) -> None: ...

    server = FakeServer()
    server.group = Hand(gives=False)  # type: ignore[assignment]
    parts = [(f"layers.{layer}.w", torch.randn(5, 3, device="cuda")) for layer in range(4)]
    sums = BitSums()
    for name, tensor in parts:
        sums.add(name, tensor)
    target = Target(ServerClient(server.address, KEY), 1, Hand(gives=True))  # type: ignore[arg-type]
    with counted() as counts:
        sent = send_weights([target], parts, torch.float32, "v1", seconds=20.0)
    server.stop()
    copied = [what for what in counts.found["from_device"] if "sending.py" in what]
    right = server.weights == sums.total and server.version == "v1" and server.by_group == 1
    return {"failures": sent.failures, "right": right, "copied": copied, "end": list(own_end(own_device()))[:2]}


CPU, GPU, OTHER = End("cpu", "", ""), End("cuda", "2.27.5", "a"), End("cuda", "2.27.5", "b")


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)


@pytest.fixture
def server():
    found = FakeServer()
    yield found
    found.stop()


@pytest.mark.parametrize(
    ("own", "theirs", "by", "why"),
    [
        (GPU, [OTHER], NCCL, "both ends have GPUs and NCCL 2.27.5"),
        (GPU, [OTHER, OTHER._replace(gpu="c")], NCCL, "both ends"),
        (CPU, [CPU], TCP, "training runs on a CPU"),
        (CPU, [GPU], TCP, "training runs on a CPU"),
        (GPU, [CPU], TCP, "the server runs on a CPU"),
        (GPU, [OTHER, CPU], TCP, "the server runs on a CPU"),
        (GPU, [OTHER._replace(nccl="2.26.2")], TCP, "the server has NCCL 2.26.2 and training 2.27.5"),
        (GPU, [OTHER._replace(nccl="")], TCP, "the server has NCCL none"),
        (GPU, [OTHER, GPU], TCP, "the server draws on the GPU that sends"),
    ],
)
def test_both_ends_decide(own, theirs, by, why):
    way = chosen_way(None, own, theirs)
    assert way.by == by and why in way.why
    assert chosen_way(GLOO, own, theirs) == (GLOO, "--rollout_weights_by")
    if by == NCCL:
        assert chosen_way(NCCL, own, theirs).by == NCCL
        return
    with pytest.raises(ServerFailure, match=f"cannot go to it by NCCL, as {why}"):
        chosen_way(NCCL, own, theirs)


def test_this_process_is_an_end_without_a_gpu():
    assert own_end(torch.device("cpu")) == CPU


def test_weights_go_by_the_group_from_the_start_on(capsys):
    servers = [FakeServer(), FakeServer()]
    engine, actor = engine_of(servers, by=GLOO), Lent()
    for _ in range(2):
        assert responses(drawn(engine, actor)) == expected(actor)
        actor.step()
    assert [(each.meetings, each.by_group, each.transfers) for each in servers] == [(1, 2, 2)] * 2
    first, second = (each.address for each in servers)
    assert capsys.readouterr().out.count(f"weights go to {first}, {second} by gloo (--rollout_weights_by)") == 1
    for each in servers:
        each.stop()


def test_on_cpus_weights_go_over_tcp_and_the_log_says_why(server, capsys):
    engine, actor = engine_of([server]), Lent()
    assert responses(drawn(engine, actor)) == expected(actor) and server.meetings == server.by_group == 0
    said = f"weights go to {server.address} by tcp (not by NCCL, as training runs on a CPU)"
    assert said in capsys.readouterr().out


def test_a_group_that_does_not_come_about_makes_way_for_tcp(server, capsys):
    server.faults["refuse_group"] = True
    engine, actor = engine_of([server], by=GLOO), Lent()
    started = time.monotonic()
    assert responses(drawn(engine, actor)) == expected(actor) and server.by_group == 0
    assert time.monotonic() - started < 4.0, "it does not wait for a server that has refused"
    said = "by tcp (not by gloo, as no group came about (it answered 500: no network))"
    assert said in capsys.readouterr().out


def test_a_server_that_was_started_again_is_met_again(server):
    engine, actor = engine_of([server], by=GLOO), Lent()
    drawn(engine, actor)
    server.version, server.group = "default", None  # as of a new process
    assert responses(drawn(engine, actor)) == expected(actor)
    assert (server.meetings, server.by_group) == (2, 2)


def test_an_end_that_leaves_lets_the_others_go(server):
    group = met(ServerClient(server.address, KEY), 1, GLOO, torch.device("cpu"), seconds=5.0)
    threading.Timer(0.2, server.group.close).start()
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        for _ in range(100):
            group.broadcast(torch.ones(10_000_000, dtype=torch.uint8), 30.0)
    assert time.monotonic() - started < 10.0
    group.close()
    with pytest.raises(RuntimeError, match="given up"):
        group.broadcast(torch.ones(1, dtype=torch.uint8), 5.0)


def test_what_an_end_gets_otherwise_than_it_is_sent_is_no_group(server, monkeypatch):
    own = WeightGroup.broadcast

    def changed(group, data, seconds):
        own(group, data, seconds)
        if threading.current_thread().name != "meeting a server":
            data[3] = 0

    monkeypatch.setattr(WeightGroup, "broadcast", changed)
    with pytest.raises(ServerFailure, match="no group came about .*other bytes come than are sent"):
        met(ServerClient(server.address, KEY), 1, GLOO, torch.device("cpu"), seconds=5.0)


def test_weights_of_a_gpu_go_from_there(on_cuda):
    """None is copied to the host where it is sent."""
    assert on_cuda(from_gpu_to_gpu) == {"failures": {}, "right": True, "copied": [], "end": ["cuda", ""]}


def test_nccl_is_told_to_end_no_process(monkeypatch):
    """The variables are set while a group is made, and as before afterwards."""
    import os

    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    with groups._in_environment(groups._ENVIRONMENT):
        assert [os.environ[name] for name in groups._ENVIRONMENT] == ["1", "0"]
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0" and "TORCH_NCCL_ENABLE_MONITORING" not in os.environ
