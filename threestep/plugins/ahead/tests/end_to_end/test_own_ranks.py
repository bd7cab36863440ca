"""`--rollouts_ahead` by servers, which draw while training goes on: neither timing nor a failing server decides."""

from __future__ import annotations

import random
import time

import pytest

from tests.distributed.launch import run_ranks
from threestep.plugins.ahead.tests.test_pipeline import STEPS, made_trainer, same, trained, weights
from threestep.plugins.vllm.servers import drawing
from threestep.plugins.vllm.servers.arguments import VllmServerArguments
from threestep.plugins.vllm.servers.engine import VllmServerRollout
from threestep.plugins.vllm.tests.fake_rollout_server import KEY, FakeServer


class Late(FakeServer):
    """Its answers take a time that no seed decides, and it notes the weights that drew."""

    def __init__(self, says) -> None:
        super().__init__(says)
        self.versions: list[str] = []

    def on_inference_v1_generate(self, body):
        time.sleep(random.SystemRandom().uniform(0.0, 0.02))
        self.versions.append(self.version)
        return super().on_inference_v1_generate(body)


def run(ahead: int, *, dies: bool = False):
    """Return a run's weights and its servers, one of which dies in the middle or not."""
    model = made_trainer(0).roles.actor_model
    servers = [Late({"architectures": [type(model).__name__]}) for _ in range(2)]
    if dies:
        servers[0].faults["die_after"] = 7
    try:
        engine = VllmServerRollout(None, VllmServerArguments(",".join(each.address for each in servers), 20.0), 64)
        engine.check(None, None)
        trainer = made_trainer(ahead, engine)
        trained(trainer, range(1, STEPS + 1))
        return weights(trainer), servers
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.setattr(drawing, "_PAUSE_SECONDS", 0.001)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_timing_and_failing_servers_decide_nothing(ahead):
    first, servers = run(ahead)
    for dies in (False, True):
        assert same(run(ahead, dies=dies)[0], first)
    updates = sorted({int(version.partition("-")[2]) for server in servers for version in server.versions})
    assert updates == list(range(0, 2 * (STEPS - ahead), 2)), "step s is drawn by the weights of step s - 1 - K"


def test_ahead_is_not_beside():
    assert not same(run(1)[0], run(0)[0])


RANKS = """
    import json, os, random, sys, time
    import torch
    import torch.distributed as dist
    from tests.distributed.launch import report
    from tests.support.tiny_models import tiny_causal_lm
    from threestep.plugins.vllm.tests.servers.test_engine import Lent, drawn
    from tests.unit.utils.generation.decoding.test_hf import responses
    from threestep.plugins.vllm.servers.arguments import VllmServerArguments
    from threestep.plugins.vllm.servers.engine import VllmServerRollout
    import threading

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    engine = VllmServerRollout(None, VllmServerArguments(sys.argv[1], 20.0), 64)
    engine.check(None, None)
    actor, found, problem = Lent(), [], ""
    if rank:
        actor.send = lambda take: None

    def draw():
        for _ in range(3):
            found.append(responses(drawn(engine, actor)))
            time.sleep(random.SystemRandom().uniform(0.0, 0.1))
            actor.step()

    thread = threading.Thread(target=draw)  # while the ranks meet for something else
    thread.start()
    for _ in range(20):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.01)
    thread.join()
    dist.barrier()
    if rank == 0:
        actor.model.lm_head.weight.data.fill_(float("nan"))
    engine._roster._given = "http://127.0.0.1:1"
    try:
        drawn(engine, actor)
    except Exception as mistake:
        problem = str(mistake)
    report({"found": found, "problem": problem})
    dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_ranks_draw_by_the_same_weights_in_threads_of_their_own():
    """And a mistake of the first rank is one of all."""
    servers = [FakeServer(), FakeServer()]
    given = ",".join(server.address for server in servers)
    try:
        first, second = run_ranks(RANKS, 2, [given], environment={"VLLM_API_KEY": KEY})
    finally:
        for server in servers:
            server.stop()
    assert first["found"] == second["found"] and len(first["found"]) == 3
    assert first["found"][0] != first["found"][1] != first["found"][2]
    assert [server.transfers for server in servers] == [3, 3], "the first rank sends"
    assert "no rollout server of --vllm_servers is left" in first["problem"] == second["problem"]
