"""A streamed response is the rollout's, token for token."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling
from training.utils.generation.decoding.hf import TransformersRollout

SAMPLING = Sampling(max_new_tokens=12, temperature=1.0, top_k=0, top_p=0.9, end_token_id=2, pad_token_id=0)


def streamed(model, prompt_ids_P, sampling, seed, more_end_tokens=()):
    return TransformersRollout().stream(model, RolloutRequest.of_prompt(prompt_ids_P, sampling, seed), more_end_tokens)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_draws_what_a_rollout_draws(family, temperature):
    model, sampling = tiny_causal_lm(family), dataclasses.replace(SAMPLING, temperature=temperature)
    prompt_ids_P = torch.tensor([5, 9, 11, 30])
    mask = torch.ones(1, 4, dtype=torch.bool)
    for seed in range(4):
        rollout = TransformersRollout().roll_out(model, RolloutRequest(prompt_ids_P[None], mask, sampling, [seed]))
        assert list(streamed(model, prompt_ids_P, sampling, seed)) == rollout.response_of(0).tolist()


def test_it_stops_at_the_models_own_end_tokens_too():
    model = tiny_causal_lm("llama")
    sampling = dataclasses.replace(SAMPLING, end_token_id=-1)  # never drawn
    whole = list(streamed(model, torch.tensor([5, 9]), sampling, 1))
    assert len(whole) == 12
    end = whole[3]
    assert list(streamed(model, torch.tensor([5, 9]), sampling, 1, {end})) == whole[: whole.index(end) + 1]
