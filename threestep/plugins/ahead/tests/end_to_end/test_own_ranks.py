"""`--rollouts_ahead` by servers, which draw while training goes on: neither timing nor a failing server decides."""

from __future__ import annotations

import pytest

from tests.distributed.launch import run_ranks
from threestep.plugins.vllm.tests.fake_rollout_server import KEY, FakeServer

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
    assert "no rollout server in --vllm_servers is left" in first["problem"] == second["problem"]
