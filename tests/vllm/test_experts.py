"""vLLM's experts, read while it draws, are those of the training forward, in float32 on this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.utils.generation.engines.test_hf import PAD, PLAIN, prompts, spelt
from tests.unit.utils.routers.test_replay import opened
from tests.vllm.conftest import started
from training.utils.contracts.rollout_engine import Ends, RolloutRequest
from training.utils.layout.rows import padded_rows

SHAPE = {"vocab_size": 64, "head_dim": 32, "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def engine():
    engine = started(spelt)
    engine.record_experts(None)
    return engine


@pytest.mark.parametrize("stop", [(), ("A",)], ids=["whole", "stop"])
def test_they_are_those_of_the_training_forward(engine, stop):
    model, replay, policy = opened("qwen3_moe", "follow", dtype=torch.float32, **SHAPE)
    ids_BP, mask_BP = prompts()
    how = replace(PLAIN, ends=Ends(texts=stop))
    rollout = engine.roll_out(model, RolloutRequest(ids_BP, mask_BP, how, list(range(16)), samples_per_prompt=2))
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


def test_experts_in_half_precision_are_those_that_were_sent():
    """vLLM packs them for the CPU's kernels when it starts, with the weights that it has then."""
    model, replay, policy = opened("qwen3_moe", "compare", dtype=torch.bfloat16, **SHAPE)
    engine = started(spelt)
    engine.record_experts(replay)
    ids_BP, mask_BP = prompts()
    rollout = engine.roll_out(model, RolloutRequest(ids_BP, mask_BP, PLAIN, list(range(8))))
    with torch.no_grad():
        read_M = policy(padded_rows(rollout.sequences(), PAD)).logprobs_M
    sampled_M = rollout.sampled_logprobs_BR[rollout.response_mask_BR]
    assert float((read_M - sampled_M).abs().mean()) < 0.05
    assert float(replay.differing().float().mean()) < 0.3
