"""Requests of clients from the desk to their answers: order, gaps, replays, restarts; without HTTP and protobuf."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from tests.support.training_orders import order_of
from threestep.plugins.tinker import request_queue
from threestep.plugins.tinker.adapters import AdaptedModel
from threestep.plugins.tinker.client_state import ClientState
from threestep.plugins.tinker.forward import Forwards
from threestep.plugins.tinker.records import AdamOrder, LoadOrder, LoraSpec, SaveOrder, UnknownRequest, WrongRequest
from threestep.plugins.tinker.request_queue import Desk
from threestep.plugins.tinker.store import ClientFolder, Store, StoredMessage
from threestep.plugins.tinker.trainer import Trainer
from training.utils.base.errors import ThreestepError

SESSION = "0" * 32
STEP = AdamOrder(0.05)


class Server:
    """A server's inside on a folder. Requests stand for themselves: a body is a place in ORDERS."""

    ORDERS: list = []

    def __init__(self, folder, adapted=None):
        self.adapted = adapted or AdaptedModel(tiny_causal_lm("llama", torch.float64).requires_grad_(False))
        self.store = Store(folder, {"name": "tiny"})
        self.samplers = []
        self.desk = Desk(self.find, self.adapted.layout, self.read)
        forwards = Forwards(self.adapted, 0, 1000)
        self.forwards = forwards
        self.trainer = Trainer(
            self.desk, forwards, self.store, base="tiny", open_sampler=self.open_sampler, move=lambda tensor: tensor,
            written=lambda result: json.dumps([result.loss, [each.tolist() for each in result.logprobs]]).encode(),
        )  # fmt: skip

    def find(self, model_id):
        return self.store.client(SESSION, int(model_id.rpartition(":")[2]))

    def read(self, message):
        order = self.ORDERS[int(message.body)]
        if isinstance(order, str):
            raise WrongRequest(order)
        return order

    def open_sampler(self, session, number, path):
        self.samplers.append((session, number, path))
        return f"{session}:sample:{number}"

    def create(self, number, rank=2):
        spec = LoraSpec(rank, number)
        files = self.store.client(SESSION, number)
        weights = self.adapted.layout(spec).new(number, torch.float64)
        files.create(spec, ClientState.new(weights), {"model_id": files.model_id})
        return files.model_id

    def submit(self, model_id, seq, order):
        self.ORDERS.append(order)
        return self.desk.submit(model_id, seq, StoredMessage(str(len(self.ORDERS) - 1).encode(), False, "any"))

    def run(self):
        while self.trainer.turn() or self.trainer.is_gathering:
            pass

    def answer(self, model_id, seq):
        found = self.desk.wait(model_id, seq, 0.0)
        return None if found is None else json.loads(found.body)

    def weights(self, model_id):
        return self.desk.client(model_id).state.weights_P


@pytest.fixture
def server(tmp_path):
    return Server(tmp_path)


def steps(server, model_id, count, begin=1, seed=0):
    for step in range(count):
        server.submit(model_id, begin + 2 * step, order_of(seed + step, "cross_entropy", [5, 7]))
        server.submit(model_id, begin + 2 * step + 1, STEP)


def test_requests_out_of_order_wait_for_the_gap(server):
    first, second = server.create(0), server.create(1)
    a, b = order_of(1, "cross_entropy", [4]), order_of(2, "cross_entropy", [6])
    for seq, order in ((3, STEP), (2, b)):
        server.submit(first, seq, order)
    server.run()
    assert server.answer(first, 2) is None and server.answer(first, 3) is None
    server.submit(first, 1, a)
    server.run()
    assert server.answer(first, 3)["metrics"]["grad_norm"] > 0
    for seq, order in ((1, a), (2, b), (3, STEP)):
        server.submit(second, seq, order)
    server.run()
    assert not server.weights(first).equal(server.weights(second))
    third = Server(server.store._folder.parent / "other")
    alone = third.create(0)
    for seq, order in ((1, a), (2, b), (3, STEP)):
        third.submit(alone, seq, order)
        third.run()
    torch.testing.assert_close(server.weights(first), third.weights(alone), rtol=1e-10, atol=1e-12)


def test_a_number_that_came_before_has_the_same_answer(server):
    client = server.create(0)
    steps(server, client, 1)
    server.run()
    before, weights = server.answer(client, 1), server.weights(client)
    assert server.submit(client, 2, AdamOrder(9.0)) == f"{client}:2"
    server.submit(client, 1, order_of(9, "cross_entropy", [3]))
    server.run()
    assert server.answer(client, 1) == before and server.weights(client).equal(weights)


def test_eight_clients_at_once_have_the_weights_of_each_alone(tmp_path):
    together, clients = Server(tmp_path / "together"), []
    for number in range(8):
        clients.append(together.create(number, rank=2 + number % 2))
    for step in range(3):
        for number, client in enumerate(clients):
            together.submit(client, 2 * step + 1, order_of(100 * number + step, "cross_entropy", [3 + number, 6]))
            together.submit(client, 2 * step + 2, STEP)
        together.run()
    for number, client in enumerate(clients):
        alone = Server(tmp_path / f"alone{number}", together.adapted)
        same = alone.create(number, rank=2 + number % 2)
        for step in range(3):
            alone.submit(same, 2 * step + 1, order_of(100 * number + step, "cross_entropy", [3 + number, 6]))
            alone.submit(same, 2 * step + 2, STEP)
        alone.run()
        torch.testing.assert_close(together.weights(client), alone.weights(same), rtol=1e-9, atol=1e-11)


def test_a_mistake_is_told_and_the_client_goes_on(server):
    client = server.create(0)
    server.submit(client, 1, "datum 0: it is wrong")
    server.submit(client, 2, order_of(1, "cross_entropy", [4]))
    server.submit(client, 3, SaveOrder("../../away"))
    server.submit(client, 4, LoadOrder("tinker://elsewhere", True))
    server.run()
    assert server.answer(client, 1) == {"error": "datum 0: it is wrong", "category": "user"}
    assert server.answer(client, 2)[0] > 0
    assert "a checkpoint's name may have at most 200 letters" in server.answer(client, 3)["error"]
    assert "this server has no weights 'tinker://elsewhere'" in server.answer(client, 4)["error"]


def test_a_forward_that_fails_fails_alone(server, monkeypatch, capsys):
    clients = [server.create(number) for number in range(2)]
    for number, client in enumerate(clients):
        server.submit(client, 1, order_of(number, "cross_entropy", [4 + number]))
    run = server.forwards.run

    def failing(jobs, layout, has_backward):
        if any(len(job.order.data[0]) == 5 for job in jobs):
            raise RuntimeError("of a forward")
        run(jobs, layout, has_backward)

    monkeypatch.setattr(server.forwards, "run", failing)
    server.run()
    assert server.answer(clients[0], 1)[0] > 0
    assert server.answer(clients[1], 1) == {"error": "the server failed; see its log", "category": "server"}
    assert "of a forward" in capsys.readouterr().err


@pytest.mark.parametrize("killed_behind", range(1, 9))
def test_a_restart_behind_any_request_ends_with_the_same_weights(tmp_path, killed_behind):
    """Requests of two steps of two forwards, killed behind each; the last ones are sent to the second server."""
    orders = [order_of(seed, "cross_entropy", [4, 5]) for seed in range(5)]
    requests = [orders[0], orders[1], STEP, SaveOrder("one"), orders[2], orders[3], STEP, orders[4]]
    whole, first = Server(tmp_path / "whole"), Server(tmp_path / "killed")
    same, client = whole.create(0), first.create(0)
    for seq, order in enumerate(requests, start=1):
        whole.submit(same, seq, order)
        whole.run()
    for seq, order in enumerate(requests[:killed_behind], start=1):
        first.submit(client, seq, order)
        if seq < killed_behind or killed_behind % 2:  # of the even ones, the last is accepted and not done
            first.run()
    told = {seq: first.answer(client, seq) for seq in range(1, killed_behind + 1)}
    second = Server(tmp_path / "killed", whole.adapted)
    for seq, order in enumerate(requests[killed_behind:], start=killed_behind + 1):
        second.submit(client, seq, order)
    second.desk.client(client)
    second.run()
    # To rounding: forwards that wait are computed together.
    torch.testing.assert_close(second.weights(client), whole.weights(same), rtol=1e-9, atol=1e-11)
    states = [server.desk.client(name).state for server, name in ((second, client), (whole, same))]
    torch.testing.assert_close(states[0].gradient_P, states[1].gradient_P, rtol=1e-8, atol=1e-10)
    assert all(second.answer(client, seq) == answer for seq, answer in told.items() if answer is not None)
    for seq in range(1, len(requests) + 1):
        known = whole.answer(same, seq)
        assert second.answer(client, seq)[0] == pytest.approx(known[0]) if seq in (1, 2, 5, 6, 8) else known


def test_a_kill_between_the_state_and_its_answer_keeps_the_answer(tmp_path, monkeypatch):
    first = Server(tmp_path)
    client = first.create(0)
    steps(first, client, 1)
    monkeypatch.setattr(type(first.desk.client(client).files), "write_result", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        first.run()
    monkeypatch.undo()
    first = Server(tmp_path, first.adapted)
    first.desk.client(client)
    first.run()  # the forward's answer was lost with the server, so it is computed once more
    assert first.answer(client, 2)["metrics"]["grad_norm"] > 0
    monkeypatch.setattr(request_queue.Desk, "finish", state_alone)
    first.submit(client, 3, order_of(3, "cross_entropy", [5]))
    with pytest.raises(KeyboardInterrupt):
        first.submit(client, 4, STEP)
        first.run()
    monkeypatch.undo()
    second = Server(tmp_path, first.adapted)
    assert second.answer(client, 4)["metrics"]["grad_norm"] > 0
    assert second.desk.client(client).next_seq == 5


def state_alone(desk, client, job, answer, has_new_weights=False):
    """`Desk.finish`, killed behind the state."""
    if has_new_weights:
        client.files.write_state(client.state, job.seq, json.loads(answer.body))
        raise KeyboardInterrupt
    client.files.write_result(job.seq, answer)
    client.next_seq = job.seq + 1
    del client.jobs[job.seq]


@pytest.mark.parametrize("part", ["write_state", "write_result"])
def test_a_disk_that_refuses_costs_no_step(tmp_path, monkeypatch, part):
    """Nothing is done twice: the client comes back from its files."""
    whole, server = Server(tmp_path / "whole"), Server(tmp_path / "refused")
    for each in (whole, server):
        steps(each, each.create(0), 2)
    whole.run()
    client, tries = f"{SESSION}:train:0", []
    write = getattr(ClientFolder, part)

    def refusing(*given, **more):
        tries.append(part)
        if len(tries) == 2:
            raise OSError(28, "No space left on device")
        write(*given, **more)

    monkeypatch.setattr(ClientFolder, part, refusing)
    with pytest.raises(OSError, match="No space left"):
        server.run()
    server.desk.client(client)  # as a request for an answer does
    server.run()
    torch.testing.assert_close(server.weights(client), whole.weights(client), rtol=1e-9, atol=1e-11)
    norms = [each.answer(client, 4)["metrics"]["grad_norm"] for each in (server, whole)]
    assert norms[0] == pytest.approx(norms[1])


def test_saved_states_and_adapters_are_loaded(server):
    client, other = server.create(0), server.create(1)
    steps(server, client, 2)
    server.submit(client, 5, SaveOrder("state"))
    server.submit(client, 6, SaveOrder("state"))
    server.submit(client, 7, SaveOrder(None, for_sampling=True, session_number=3))
    server.run()
    path, sampler = server.answer(client, 5)["path"], server.answer(client, 7)
    assert path == f"tinker://{client}/weights/state"
    assert "checkpoint 'state' already exists" in server.answer(client, 6)["error"]
    assert server.samplers == [(SESSION, 3, sampler["path"])]
    assert sampler["sampling_session_id"] == f"{SESSION}:sample:3"
    for number, (address, with_optimizer) in enumerate([(path, True), (path, False), (sampler["path"], True)]):
        server.submit(other, 1 + 3 * number, LoadOrder(address, with_optimizer))
        server.run()
        state, saved = server.desk.client(other).state, server.desk.client(client).state
        assert state.weights_P.equal(saved.weights_P)
        assert state.steps == (saved.steps if with_optimizer and address == path else 0)
        steps(server, other, 1, begin=2 + 3 * number, seed=50)
        server.run()
    narrow = server.create(2, rank=3)
    server.submit(narrow, 1, LoadOrder(path, True))
    server.run()
    assert (
        "has adapters of rank 2 on attention, mlp, head, but this client has rank 3"
        in server.answer(narrow, 1)["error"]
    )


def test_a_request_that_never_comes_fails_those_behind_it(server, monkeypatch):
    client = server.create(0)
    server.submit(client, 2, STEP)
    server.desk.fail_gaps()
    assert server.answer(client, 2) is None
    monkeypatch.setattr(request_queue, "GAP_SECONDS", -1.0)
    server.desk.fail_gaps()
    assert "request 1 of this client never arrived" in server.answer(client, 2)["error"]
    monkeypatch.undo()
    steps(server, client, 1, begin=3)
    server.run()
    assert "metrics" in server.answer(client, 4)
    with pytest.raises(WrongRequest, match="seq_id must be 5, the next one, got 900005; number requests in order"):
        server.submit(client, 900005, STEP)


def test_clients_that_do_nothing_leave_memory_and_come_back(server, monkeypatch):
    monkeypatch.setattr(request_queue, "MOST_RESIDENT", 2)
    clients = [server.create(number) for number in range(4)]
    for client in clients:
        server.submit(client, 1, order_of(1, "cross_entropy", [4]))
        server.run()
    assert len(server.desk._clients) <= 3
    gradients = [server.desk.client(client).state.gradient_P for client in clients]
    assert all(gradient is not None for gradient in gradients)
    server.submit(clients[0], 2, STEP)
    server.run()
    assert server.answer(clients[0], 2)["metrics"]["grad_norm"] == pytest.approx(float(gradients[0].norm()))


def test_what_is_not_there_is_told(server, tmp_path):
    client = server.create(0)
    with pytest.raises(
        UnknownRequest, match="there is no training client '.*:train:7' on this server; create it first"
    ):
        server.submit(f"{SESSION}:train:7", 1, STEP)
    with pytest.raises(UnknownRequest, match="request 1 of .* is neither waiting nor answered"):
        server.answer(client, 1)
    with pytest.raises(
        ThreestepError, match="holds clients from a server with name 'tiny', but this one has 'large'; start the server"
    ):
        Store(tmp_path, {"name": "large"})
