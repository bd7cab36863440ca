"""The experts of a rollout of transformers: those of a forward of the whole sequences, whoever leaves the batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.utils.generation.decoding.test_hf import PAD, PLAIN, prompts
from threestep.plugins.routers.tests.test_replay import opened
from training.utils.contracts.rollout_engine import RolloutRequest
from training.utils.generation.decoding.decoding import MASKED, WAYS
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.layout.rows import padded_rows


@pytest.mark.parametrize(
    ("way", "prefill_tokens"), [(WAYS[0], None), (MASKED, None), (MASKED, 4)], ids=["theirs", "ours", "in_parts"]
)
def test_they_are_those_of_a_forward_of_the_sequences(way, prefill_tokens):
    model, replay, policy = opened("qwen3_moe", "compare", vocab_size=64)
    engine = TransformersRollout()
    engine._way, engine._prefill_tokens = way, prefill_tokens
    engine.record_experts(replay)
    ids_BP, mask_BP = prompts()
    request = RolloutRequest(ids_BP, mask_BP, PLAIN, list(range(16)), samples_per_prompt=2)
    first = engine.roll_out(model, request)
    end = int(first.response_ids_BR[0, 3])  # so that rows end and leave
    request = replace(request, sampling=replace(PLAIN, end_token_id=end))
    rollout = engine.roll_out(model, request)
    assert len(set(rollout.response_lengths_B.tolist())) > 1 and rollout.experts is not None
    rows = padded_rows(rollout.sequences(), PAD)
    with torch.no_grad(), replay.recorded(model) as last:
        policy(rows.of_free_experts())
        own_NTLK = last().view(rows.experts_NTLK.shape)
    is_known_NT = torch.zeros(rows.input_ids_NT.shape, dtype=torch.bool)
    for row, sequence in enumerate(rollout.sequences()):
        is_known_NT[row, : len(sequence) - 1] = True  # nothing reads the last token
    assert torch.equal((rows.experts_NTLK >= 0).all(dim=-1).all(dim=-1), is_known_NT)
    assert torch.equal(rows.experts_NTLK.sort(-1).values[is_known_NT], own_NTLK.sort(-1).values[is_known_NT])
    plainly = TransformersRollout()
    plainly._way, plainly._prefill_tokens = way, prefill_tokens
    alone = plainly.roll_out(model, request)  # recording changes nothing
    assert alone.experts is None and torch.equal(alone.response_ids_BR, rollout.response_ids_BR)
    assert torch.equal(alone.sampled_logprobs_BR, rollout.sampled_logprobs_BR)
