"""Weights on their way to servers: what arrives is what was sent, by TCP, by files, and by groups."""

from __future__ import annotations

import queue
import socket
import threading
import time
from itertools import chain
from typing import Any

import pytest
import torch

from tests.support.cuda_stand_in.device import counted
from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.lora.adapted import adapter_layers
from threestep.plugins.lora.adding import add_lora
from threestep.plugins.lora.preparers import Lora
from threestep.plugins.vllm.servers import groups
from threestep.plugins.vllm.servers.client import ServerClient, ServerFailure
from threestep.plugins.vllm.servers.groups import End, WeightGroup, chosen_way, met, own_end
from threestep.plugins.vllm.servers.protocol import GLOO, NCCL, TCP
from threestep.plugins.vllm.servers.sending import Target, _frames, send_weights
from threestep.plugins.vllm.servers.stream import Frame, end_frame, framed, received, with_adapters
from threestep.plugins.vllm.tests.fake_rollout_server import KEY, FakeServer
from threestep.plugins.vllm.tests.servers.test_engine import Lent, drawn, engine_of, expected, responses, sum_of
from training.utils.base.errors import ThreestepError
from training.utils.engine.zero3 import adapter_parts, full_tensors
from training.utils.models.weights import NO_ADAPTERS, adapters_of


def tensors():
    torch.manual_seed(0)
    return [
        ("model.layers.0.a", torch.randn(3, 5)),
        ("model.layers.1.b", torch.randn(4, 6).t()),
        ("count", torch.arange(3)),
        ("half", torch.randn(2, 2).bfloat16()),
        ("one", torch.tensor(2.0)),
        ("none", torch.empty(0, 2)),
    ]


def broken():
    yield from tensors()[:2]
    raise RuntimeError("a rank is gone")


def served(*parts):
    """A trainer that sends these parts; its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = server.accept()
        with connection:
            connection.recv(64)
            for part in parts:
                connection.sendall(part)
        server.close()

    threading.Thread(target=serve, daemon=True).start()
    return server.getsockname()[1]


def test_every_bit_arrives():
    parts = [part for name, tensor in tensors() for part in framed(Frame(name, tensor))]
    got, sums = received("127.0.0.1", served(*parts, end_frame({"": 3, "0": 2**64 - 1})), "s" * 64, 5.0)
    assert sums == {"": 3, "0": 2**64 - 1}
    for (name, tensor), (got_name, got_tensor, _) in zip(tensors(), got, strict=True):
        assert got_name == name and got_tensor.dtype == tensor.dtype and torch.equal(got_tensor, tensor)


def test_a_transfer_that_breaks_off():
    header, payload = framed(Frame("a", torch.ones(1000)))
    with pytest.raises(ConnectionError, match="the transfer ended before all weights had arrived"):
        received("127.0.0.1", served(header, payload[:100]), "s" * 64, 5.0)
    with pytest.raises(ConnectionError):
        received("127.0.0.1", served(header, payload), "s" * 64, 5.0)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        received("127.0.0.1", silent.getsockname()[1], "s" * 64, 0.05)


class Strange(FakeServer):
    """A server that lets somebody else connect first."""

    def on_update_weights(self, body):
        where = body["update_info"]
        if "host" in where:
            with socket.create_connection((where["host"], where["port"])) as connection:
                connection.sendall(b"x" * 64)
                assert connection.recv(10) == b"", "it gets nothing"
        return super().on_update_weights(body)


class Crowded(FakeServer):
    """A server that connects behind many that are silent, or slow."""

    def on_update_weights(self, body):
        where = body["update_info"]
        crowd = [socket.create_connection((where["host"], where["port"])) for _ in range(300)]
        for each in crowd[-2:]:
            each.sendall(b"x")
        try:
            return super().on_update_weights(body)
        finally:
            for each in crowd:
                each.close()


@pytest.fixture
def servers():
    found = [Strange(), FakeServer()]
    yield found
    for server in found:
        server.stop()


def targets(servers, by: str = TCP):
    clients = [ServerClient(server.address, KEY) for server in servers]
    groups = [None if by == TCP else met(client, 1, by, torch.device("cpu"), seconds=5.0) for client in clients]
    return [Target(client, 1, group) for client, group in zip(clients, groups, strict=True)]


def send(servers, seconds: float = 5.0, given=None, folder=None, by: str = TCP):
    given = given or tensors()
    return send_weights(targets(servers, by), given, torch.bfloat16, "v1", seconds=seconds, folder=folder)


@pytest.mark.parametrize("by", [TCP, GLOO, "a file"])
def test_all_servers_get_the_weights_in_the_dtype(servers, tmp_path, by):
    sent = send(servers, folder=str(tmp_path)) if by == "a file" else send(servers, by=by)
    assert not sent.failures and all(server.by_group == (by == GLOO) for server in servers)
    expected = sum_of((name, tensor.bfloat16() if tensor.is_floating_point() else tensor) for name, tensor in tensors())
    for server in servers:
        assert server.weights == expected and server.version == "v1" and server.resets == 1
    assert sent.bytes > len(servers) * (15 + 24 + 4 + 1) * 2 and not list(tmp_path.iterdir())


def test_files_that_fail(servers, tmp_path):
    """What a server cannot read leaves its old weights; a folder that is not there ends the run."""
    servers[0].faults["refuse_finish"] = True
    sent = send(servers, folder=str(tmp_path))
    assert "could not load the weights: it answered 500: no room" in sent.failures[servers[0].address]
    assert [server.version for server in servers] == ["default", "v1"] and not list(tmp_path.iterdir())

    with pytest.raises(RuntimeError, match="a rank is gone"):
        send(servers, given=broken(), folder=str(tmp_path))
    assert not list(tmp_path.iterdir()) and servers[1].transfers == 1
    with pytest.raises(ThreestepError, match="--rollout_weights_folder .* with room for the weights, got No such file"):
        send(servers, folder=str(tmp_path / "none"))


@pytest.mark.parametrize("by", [TCP, GLOO])
def test_a_server_that_dies_in_a_transfer_holds_up_no_other(servers, by):
    servers[0].faults["die_in_transfer"] = True
    big = [("a", torch.ones(4_000_000)), *tensors()]
    started = time.monotonic()
    sent = send(servers, given=big, by=by)
    assert list(sent.failures) == [servers[0].address] and time.monotonic() - started < 4.0
    assert [server.transfers for server in servers] == [0, 1]


def test_bytes_that_a_group_changes_leave_the_old_weights(servers, monkeypatch):
    own = WeightGroup.broadcast
    given = targets(servers, GLOO)

    def changed(group, data, seconds):
        own(group, data, seconds)
        if group is servers[0].group:
            data[0] += 1

    monkeypatch.setattr(WeightGroup, "broadcast", changed)
    sent = send_weights(given, [("a", torch.ones(3))], torch.float32, "v1", seconds=5.0)
    assert list(sent.failures) == [servers[0].address] and [each.version for each in servers] == ["default", "v1"]


@pytest.mark.parametrize("by", [TCP, GLOO])
def test_a_gather_that_fails_ends_the_transfer_everywhere(servers, by):
    with pytest.raises(RuntimeError, match="a rank is gone"):
        send(servers, given=broken(), by=by)
    assert not send(servers, by=by).failures
    assert [server.transfers for server in servers] == [1, 1]


def test_a_server_that_does_not_connect(servers, monkeypatch):
    monkeypatch.setattr(servers[0], "on_update_weights", lambda body: threading.Event().wait(2.0))
    sent = send(servers, seconds=0.2)
    (reason,) = sent.failures.values()
    assert servers[0].address in sent.failures and "not connect to receive the weights within 0.2 seconds; if" in reason
    assert servers[1].transfers == 1


def test_old_answers_that_a_server_keeps(servers, monkeypatch):
    monkeypatch.setattr(servers[0], "on_reset_prefix_cache", lambda body: {"success": False})
    assert "it keeps results computed with the old weights" in send(servers).failures[servers[0].address]


def test_the_silent_and_the_slow_hold_up_nobody():
    server = Crowded()
    started = time.monotonic()
    assert not send([server]).failures and server.transfers == 1
    assert time.monotonic() - started < 4.0
    server.stop()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_are_added_as_they_are_merged_in_training(family):
    """GPT-2's layers are transposed."""
    model = with_lora(family)
    base = dict(full_tensors(model, 0, merged=False))
    frames = list(_frames(adapter_parts(model, 0), torch.float32))
    assert {frame.name for frame in frames} < base.keys() and len(frames) > 4
    whole = with_adapters(base, frames)
    for name, tensor in full_tensors(model, 0):
        torch.testing.assert_close(whole[name], tensor, rtol=0, atol=1e-6)
    changed = {name for name in whole if not torch.equal(whole[name], base[name])}
    assert changed == {frame.name for frame in frames}


def test_what_is_trained_beside_adapters_makes_them_no_part():
    model = with_lora("llama")
    assert adapters_of(model).train_alone(model)
    assert not NO_ADAPTERS.train_alone(tiny_causal_lm("llama"))
    model.model.norm.weight.requires_grad_(True)
    assert not adapters_of(model).train_alone(model)


def with_lora(family: str):
    model = add_lora(tiny_causal_lm(family), Lora(lora_dim=4, lora_alpha=16.0))
    for _, layer in adapter_layers(model):
        torch.nn.init.normal_(layer.lora_B["default"].weight)
    return model


def test_after_the_first_time_adapters_come_alone(servers):
    model, clients = with_lora("llama"), [*targets(servers[:1]), *targets(servers[1:], GLOO)]
    for first in (True, False):
        for _, layer in adapter_layers(model):
            torch.nn.init.normal_(layer.lora_B["default"].weight)
        parts = chain(full_tensors(model, 0, merged=False) if first else (), adapter_parts(model, 0))
        sent = send_weights(clients, parts, torch.float32, "v", seconds=5.0, base="run")
        assert not sent.failures
        assert all(server.weights == sum_of(full_tensors(model, 0)) for server in servers)


# Runs where the pretended GPU is.


def from_gpu_to_gpu() -> dict[str, Any]:
    """Send weights of a GPU to a server by a group whose ends are a GPU's, and hand its bytes over in this process."""
    from threestep.plugins.vllm.servers.groups import own_device
    from threestep.plugins.vllm.servers.sending import Target, send_weights

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
    target = Target(ServerClient(server.address, KEY), 1, Hand(gives=True))  # type: ignore[arg-type]
    with counted() as counts:
        sent = send_weights([target], parts, torch.float32, "v1", seconds=20.0)
    server.stop()
    copied = [what for what in counts.found["from_device"] if "sending.py" in what]
    right = server.weights == sum_of(parts) and server.version == "v1" and server.by_group == 1
    return {"failures": sent.failures, "right": right, "copied": copied, "end": list(own_end(own_device()))[:2]}


CPU, GPU, OTHER = End("cpu", "", ""), End("cuda", "2.27.5", "a"), End("cuda", "2.27.5", "b")


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)


@pytest.fixture
def server(servers):
    return servers[1]


@pytest.mark.parametrize(
    ("own", "theirs", "by", "why"),
    [
        (GPU, [OTHER], NCCL, "both ends have GPUs and NCCL 2.27.5"),
        (GPU, [OTHER, OTHER._replace(gpu="c")], NCCL, "both ends"),
        (CPU, [CPU], TCP, "training runs on a CPU"),
        (CPU, [GPU], TCP, "training runs on a CPU"),
        (GPU, [CPU], TCP, "the server runs on a CPU"),
        (GPU, [OTHER, CPU], TCP, "the server runs on a CPU"),
        (GPU, [OTHER._replace(nccl="2.26.2")], TCP, "the server has NCCL 2.26.2 but training has 2.27.5"),
        (GPU, [OTHER._replace(nccl="")], TCP, "the server has NCCL none"),
        (GPU, [OTHER, GPU], TCP, "the server generates on the same GPU that sends"),
    ],
)
def test_both_ends_decide(own, theirs, by, why):
    assert own_end(torch.device("cpu")) == CPU
    way = chosen_way(None, own, theirs)
    assert way.by == by and why in way.why
    assert chosen_way(GLOO, own, theirs) == (GLOO, "--rollout_weights_by")
    if by == NCCL:
        assert chosen_way(NCCL, own, theirs).by == NCCL
        return
    with pytest.raises(ServerFailure, match=f"cannot be sent to it with NCCL, because {why}"):
        chosen_way(NCCL, own, theirs)


def test_weights_go_by_the_group_from_the_start_on(servers, capsys):
    engine, actor = engine_of(servers, by=GLOO), Lent()
    for _ in range(2):
        assert responses(drawn(engine, actor)) == expected(actor)
        actor.step()
    assert [(each.meetings, each.by_group, each.transfers) for each in servers] == [(1, 2, 2)] * 2
    first, second = (each.address for each in servers)
    assert capsys.readouterr().out.count(f"weights are sent to {first}, {second} over gloo (--rollout_weights_by)") == 1


def test_on_cpus_weights_go_over_tcp_and_the_log_says_why(server, capsys):
    engine, actor = engine_of([server]), Lent()
    assert responses(drawn(engine, actor)) == expected(actor) and server.meetings == server.by_group == 0
    said = f"weights are sent to {server.address} over tcp (not NCCL, because training runs on a CPU)"
    assert said in capsys.readouterr().out


def test_a_group_that_does_not_come_about_makes_way_for_tcp(server, capsys):
    server.faults["refuse_group"] = True
    engine, actor = engine_of([server], by=GLOO), Lent()
    started = time.monotonic()
    assert responses(drawn(engine, actor)) == expected(actor) and server.by_group == 0
    assert time.monotonic() - started < 4.0, "it does not wait for a server that has refused"
    said = "over tcp (not gloo, because the group could not be formed (it answered 500: no network))"
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
    with pytest.raises(RuntimeError, match="has been closed"):
        group.broadcast(torch.ones(1, dtype=torch.uint8), 5.0)


def test_what_an_end_gets_otherwise_than_it_is_sent_is_no_group(server, monkeypatch):
    own = WeightGroup.broadcast

    def changed(group, data, seconds):
        own(group, data, seconds)
        if threading.current_thread().name != "meeting a server":
            data[3] = 0

    monkeypatch.setattr(WeightGroup, "broadcast", changed)
    with pytest.raises(
        ServerFailure, match="the group could not be formed .*the received bytes differ from the sent ones"
    ):
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
