"""Rollouts by two real vLLM servers beside those of `hf` and of `vllm` in this process, in float32 on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.distributed.launch import ROOT, run_ranks
from tests.support.tiny_models import tiny_causal_lm
from tests.unit.utils.generation.decoding.test_hf import GREEDY, PLAIN, frequent_token, prompts, responses, roll, spelt
from threestep.plugins.hybrid.engine import _logprobs
from threestep.plugins.vllm.servers.arguments import VllmServerArguments
from threestep.plugins.vllm.servers.client import ServerClient
from threestep.plugins.vllm.servers.drawing import weights_of
from threestep.plugins.vllm.servers.engine import VllmServerRollout
from threestep.plugins.vllm.tests.servers.test_engine import Lent
from threestep.plugins.vllm.tests.vllm.conftest import SHAPES, started
from threestep.plugins.vllm.tests.vllm.servers import KEY, started_servers
from threestep.plugins.vllm.tests.vllm.sync_program import SERVER_CASES
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rollout_engine import Ends, RolloutRequest

UPDATES = 20
CUT = {"top_k": 20, "top_p": 0.8, "min_p": 0.02}
SECONDS = 240.0
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)


@pytest.fixture(scope="module", params=SHAPES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    place = tmp_path_factory.mktemp(family)
    tiny_causal_lm(family, seed=7, **SHAPES[family]).save_pretrained(place)  # other weights than those that are sent
    return place


@pytest.fixture(scope="module")
def servers(folder, tmp_path_factory):
    with started_servers(folder, tmp_path_factory.mktemp("logs"), 2) as found:
        yield found


@pytest.fixture(scope="module")
def drawing(servers, family):
    """An engine that draws by both, and the model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", KEY)
        given = VllmServerArguments(",".join(server.address for server in servers), SECONDS)
        engine = VllmServerRollout(spelt, given, 64)
    engine.check(None, None)
    actor = Lent()
    actor.model = tiny_causal_lm(family, **SHAPES[family])
    return engine, actor


def draw(drawing, how, samples: int = 1):
    engine, actor = drawing
    ids_BP, mask_BP = prompts()
    with engine.lent(actor) as model:
        return engine.roll_out(model, RolloutRequest(ids_BP, mask_BP, how, range(len(ids_BP) * samples), samples))


def test_greedy_rollouts_are_those_of_hf(drawing):
    model = drawing[1].model
    how = replace(GREEDY, end_token_id=frequent_token(roll(model, GREEDY)))
    expected, got = roll(model, how), draw(drawing, how)
    assert responses(got) == responses(expected) and torch.equal(got.ended_B, expected.ended_B)
    torch.testing.assert_close(got.sampled_logprobs_BR, expected.sampled_logprobs_BR, rtol=0, atol=1e-4)


@pytest.mark.parametrize("cut", [{}, CUT], ids=["whole", "cut"])
def test_responses_are_those_of_the_engine_beside_training(drawing, cut):
    """The same seeds draw the same tokens; log-probabilities are the training forward's, before all cuts."""
    engine, model = started(spelt), drawing[1].model
    how = replace(PLAIN, temperature=0.7, **cut)
    got = draw(drawing, how, samples=2)
    ids_BP, mask_BP = prompts()
    expected = engine.roll_out(model, RolloutRequest(ids_BP, mask_BP, how, range(len(ids_BP) * 2), 2))
    assert responses(got) == responses(expected)
    mask_BR = got.response_mask_BR
    for other in (expected.sampled_logprobs_BR[mask_BR], _logprobs(model, got, how).detach()):
        torch.testing.assert_close(got.sampled_logprobs_BR[mask_BR], other, rtol=0, atol=1e-4)


def test_stop_strings_end_a_response_with_the_token_that_completes_them(drawing):
    model = drawing[1].model
    how = replace(GREEDY, ends=Ends((spelt(responses(draw(drawing, GREEDY))[2][4:6]),)))
    got, expected = draw(drawing, how), roll(model, how, decode=spelt)
    assert responses(got) == responses(expected) and torch.equal(got.ended_B, expected.ended_B)
    assert 0 < int(got.ended_B.sum()) < 8


def test_log_probabilities_follow_the_new_weights(servers, folder, family):
    """20 updates on two ranks. The figures of the lab book are these."""
    cases = list(SERVER_CASES) if family == "qwen3" else ["zero0", "zero0_lora"]
    program = Path(__file__).with_name("sync_program.py")
    words = [folder, UPDATES, ",".join(server.address for server in servers), ",".join(cases)]
    reports = run_ranks(program, 2, words, timeout_seconds=1500)
    print(reports)
    for case in cases:
        for report in reports:
            got = report[case]
            assert got["worst"] < 1e-4 < got["moved"], (case, got)
            assert got["sent"] == UPDATES and got["sent_again"] == 1, (case, got)


def test_weights_go_by_a_group_as_over_tcp(servers, drawing, family, capsys):
    """Of the trainer and both servers' workers, which have groups of their own; NCCL takes the same path."""
    given = VllmServerArguments(",".join(server.address for server in servers), SECONDS, rollout_weights_by="gloo")
    engine = VllmServerRollout(spelt, given, 64)
    engine.check(None, None)
    actor = Lent()
    actor.model = tiny_causal_lm(family, seed=9, **SHAPES[family])
    for _ in range(2):
        assert responses(draw((engine, actor), GREEDY)) == responses(roll(actor.model, GREEDY))
        actor.step()
    assert [group.device.type for group in engine._roster._groups.values()] == ["cpu", "cpu"]
    assert "over gloo (--rollout_weights_by)" in capsys.readouterr().out
    drawing[1].step()
    assert responses(draw(drawing, GREEDY)) == responses(roll(drawing[1].model, GREEDY)), "and over TCP again"


def test_nothing_answers_without_the_key(servers):
    address = servers[0].address
    for path in ("/collective_rpc", "/update_weights", "/weight_info", "/v1/models"):
        with pytest.raises(Exception, match="it refuses the key"):
            ServerClient(address).post(path, {}, 10.0)


KILLED = """
import os, signal, sys
from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.vllm.tests.vllm.conftest import SHAPES
from threestep.plugins.vllm.servers.client import ServerClient
from threestep.plugins.vllm.servers.sending import send_weights
import torch

def tensors():
    for number, pair in enumerate(tiny_causal_lm(sys.argv[2], seed=3, **SHAPES[sys.argv[2]]).named_parameters()):
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        yield pair

client = ServerClient(sys.argv[1], os.environ["VLLM_API_KEY"])
send_weights([(client, 1)], tensors(), torch.float32, "half", seconds=60.0)
"""


def test_a_trainer_that_is_killed_in_a_transfer_leaves_the_old_weights(drawing, servers, family):
    """The server that was sent a half keeps its own, is not sent any again, and draws by them."""
    before = draw(drawing, PLAIN, samples=2)
    client = ServerClient(servers[0].address, KEY)
    version = weights_of(client, SECONDS)
    words = [sys.executable, "-c", KILLED, servers[0].address, family]
    ended = subprocess.run(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300, check=False)
    assert ended.returncode == -signal.SIGKILL and weights_of(client, SECONDS) == version
    assert responses(draw(drawing, PLAIN, samples=2)) == responses(before)
    drawing[1].step()
    assert responses(draw(drawing, GREEDY)) == responses(roll(drawing[1].model, GREEDY)), "and takes the next"


def test_a_server_that_is_killed_in_a_rollout(drawing, servers, capsys):
    how = replace(PLAIN, max_new_tokens=48)
    expected = responses(draw(drawing, how, samples=4))
    engine, actor = drawing
    killer = threading.Timer(0.3, servers[1].kill)
    ids_BP, mask_BP = prompts()
    with engine.lent(actor) as model:
        servers[1].pause()  # it takes the requests, and answers none, however fast this machine is
        killer.start()
        got = engine.roll_out(model, RolloutRequest(ids_BP, mask_BP, how, range(len(ids_BP) * 4), 4))
    killer.join()
    assert responses(got) == expected
    assert f"rollout server {servers[1].address} dropped (no answer" in capsys.readouterr().out
    assert responses(draw(drawing, GREEDY)) == responses(roll(actor.model, GREEDY))


def test_the_last_server_that_is_killed_in_a_transfer(drawing, servers):
    engine, actor = drawing
    named = list(actor.model.named_parameters())

    def send(take):
        def tensors():
            yield from named[:5]
            servers[0].kill()
            yield from named[5:]

        take(tensors())

    actor.updates, actor.send = actor.updates + 1, send
    started_at = time.monotonic()
    with pytest.raises(ThreestepError, match="no rollout server in --vllm_servers is left .*weights: .*--resume"):
        draw(drawing, GREEDY)
    assert time.monotonic() - started_at < SECONDS
