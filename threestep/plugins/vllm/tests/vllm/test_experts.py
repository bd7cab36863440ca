"""vLLM's experts, read while it draws, beside training and in a server, are those of the training forward."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from tests.unit.utils.generation.decoding.test_hf import PAD, PLAIN, prompts, spelt
from threestep.plugins.routers.tests.test_replay import opened
from threestep.plugins.vllm.servers.arguments import VllmServerArguments
from threestep.plugins.vllm.servers.engine import VllmServerRollout
from threestep.plugins.vllm.tests.servers.test_engine import Lent
from threestep.plugins.vllm.tests.vllm.conftest import started
from threestep.plugins.vllm.tests.vllm.servers import KEY, started_servers
from training.utils.contracts.rollout_engine import Ends, RolloutRequest
from training.utils.layout.rows import padded_rows

pytestmark = pytest.mark.timeout(1200)
SHAPE = {"vocab_size": 64, "head_dim": 32, "moe_intermediate_size": 32}
SHAPES = {"qwen3_moe": SHAPE, "mixtral": {"vocab_size": 64, "head_dim": 32, "intermediate_size": 32}}


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)


@contextmanager
def drawing(where: str, model, place):
    """What draws from this model, and notes its experts, beside training or by a server that has other weights."""
    if where == "beside":
        engine = started(spelt)
        engine.record_experts(None)
        yield engine.roll_out
        return
    dtype = str(model.dtype).removeprefix("torch.")
    other, _, _ = opened(model.config.model_type, "follow", dtype=model.dtype, **SHAPES[model.config.model_type])
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(0.5)
    other.save_pretrained(place)
    actor = Lent()
    with started_servers(place, place, 1, "--dtype", dtype) as [server]:
        engine = VllmServerRollout(spelt, VllmServerArguments(server.address, 240.0), 64)
        engine.record_experts(None)
        engine.check(None, None)

        def roll_out(model, request):
            actor.model, actor.updates = model, actor.updates + 1
            with engine.lent(actor) as lent:
                return engine.roll_out(lent, request)

        yield roll_out


@pytest.fixture(
    scope="module",
    params=[("beside", "qwen3_moe"), ("beside", "mixtral"), ("server", "qwen3_moe"), ("server", "mixtral")],
)
def at_work(request, tmp_path_factory):
    """The family, and what draws from it."""
    where, family = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_API_KEY", KEY)
        model, _, _ = opened(family, "follow", dtype=torch.float32, **SHAPES[family])
        with drawing(where, model, tmp_path_factory.mktemp("server")) as found:
            yield family, found


@pytest.mark.parametrize("stop", [(), ("A",)], ids=["whole", "stop"])
def test_they_are_those_of_the_training_forward(at_work, stop):
    family, roll_out = at_work
    model, replay, policy = opened(family, "follow", dtype=torch.float32, **SHAPES[family])
    ids_BP, mask_BP = prompts()
    how = replace(PLAIN, ends=Ends(texts=stop))
    rollout = roll_out(model, RolloutRequest(ids_BP, mask_BP, how, list(range(16)), samples_per_prompt=2))
    rows = padded_rows(rollout.sequences(), PAD)
    with torch.no_grad(), replay.recorded(model) as last:
        free_M = policy(rows.of_free_experts()).logprobs_M
        own_NTLK = last().view(rows.experts_NTLK.shape)
        followed_M = policy(rows).logprobs_M
        differ_NT = replay.differing().view(rows.input_ids_NT.shape)
    is_known_NT = torch.zeros(rows.input_ids_NT.shape, dtype=torch.bool)
    for row, sequence in enumerate(rollout.sequences()):
        is_known_NT[row, : len(sequence) - 1] = True
    assert torch.equal((rows.experts_NTLK >= 0).all(dim=-1).all(dim=-1), is_known_NT)
    assert torch.equal(rows.experts_NTLK.sort(-1).values[is_known_NT], own_NTLK.sort(-1).values[is_known_NT])
    assert not differ_NT.any()
    sampled_M = rollout.sampled_logprobs_BR[rollout.response_mask_BR]
    torch.testing.assert_close(followed_M, sampled_M, rtol=0, atol=1e-4)
    torch.testing.assert_close(followed_M, free_M, rtol=0, atol=1e-5)


@pytest.mark.parametrize("where", ["beside", "server"])
def test_experts_in_half_precision_are_those_that_were_sent(where, tmp_path):
    """vLLM packs them for the CPU's kernels when it starts, with the weights that it has then."""
    model, replay, policy = opened("qwen3_moe", "compare", dtype=torch.bfloat16, **SHAPE)
    ids_BP, mask_BP = prompts()
    with drawing(where, model, tmp_path) as roll_out:
        rollout = roll_out(model, RolloutRequest(ids_BP, mask_BP, PLAIN, list(range(8))))
    with torch.no_grad():
        read_M = policy(padded_rows(rollout.sequences(), PAD)).logprobs_M
    sampled_M = rollout.sampled_logprobs_BR[rollout.response_mask_BR]
    assert float((read_M - sampled_M).abs().mean()) < 0.05
    assert float(replay.differing().float().mean()) < 0.3
