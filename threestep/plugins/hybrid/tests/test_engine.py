"""DeepSpeed's own engine: transformers' responses, cut at their ends, with the training forward's log-probabilities."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from tests.unit.utils.generation.decoding.test_decode_check import known
from tests.unit.utils.generation.decoding.test_hf import (
    GREEDY,
    PAD,
    PLAIN,
    frequent_token,
    prompts,
    responses,
    roll,
    spelt,
)
from threestep.plugins.hybrid.engine import HybridRollout
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.rollout import Rollout
from training.utils.contracts.rollout_engine import Ends, RolloutRequest, Sampling
from training.utils.generation.table import checked_engine


def theirs(model, how: Sampling, samples: int = 1, seed: int = 0, decode=None) -> Rollout:
    ids_BP, mask_BP = prompts()
    seeds = range(seed, seed + len(ids_BP) * samples)
    return HybridRollout(decode).roll_out(model, RolloutRequest(ids_BP, mask_BP, how, seeds, samples))


@pytest.mark.parametrize("family", ["llama", "opt", "gemma3_text", "mamba"])
def test_greedy_rollouts_are_those_of_hf(family):
    model = tiny_causal_lm(family)
    free = roll(model, GREEDY)
    how = replace(GREEDY, end_token_id=frequent_token(free), ends=Ends(token_ids=(int(free.response_ids_BR[0, 3]),)))
    ours, got = roll(model, how), theirs(model, how)
    assert responses(got) == responses(ours)
    assert torch.equal(got.response_ids_BR, ours.response_ids_BR) and torch.equal(got.ended_B, ours.ended_B)
    torch.testing.assert_close(got.sampled_logprobs_BR, ours.sampled_logprobs_BR, rtol=1e-4, atol=1e-4)


def test_samples_are_the_same_for_the_same_batch_and_seeds():
    model = tiny_causal_lm("llama")
    how = replace(PLAIN, temperature=0.8, top_k=20, top_p=0.9, end_token_id=frequent_token(roll(model, PLAIN)))
    before = torch.random.get_rng_state()
    got = theirs(model, how, samples=2)
    assert torch.equal(torch.random.get_rng_state(), before)  # other parts of the run draw what they drew
    assert responses(theirs(model, how, samples=2)) == responses(got) != responses(theirs(model, how, 2, seed=1))
    assert torch.equal(got.prompt_ids_BP, prompts()[0].repeat_interleave(2, 0))
    assert len({tuple(response) for response in responses(got)}) > 8
    assert 0 < int(got.ended_B.sum()) < 16
    assert (got.response_ids_BR[~got.response_mask_BR] == PAD).all() and got.seconds > 0


def test_stop_strings_cut_what_was_generated():
    model = tiny_causal_lm("llama")
    free = responses(theirs(model, PLAIN))
    rollout = theirs(model, replace(PLAIN, ends=Ends((spelt(free[2][4:6]),))), decode=spelt)
    assert responses(rollout)[2] == free[2][:6] and bool(rollout.ended_B[2])
    assert not rollout.ended_B.all()


def test_a_models_own_generation_settings_change_nothing():
    model = tiny_causal_lm("llama")
    expected = responses(theirs(model, PLAIN))
    own = model.generation_config
    own.repetition_penalty, own.top_k, own.eos_token_id, own.min_new_tokens = 5.0, 2, expected[0][0], 9
    assert responses(theirs(model, PLAIN)) == expected
    assert model.generation_config is own


def test_a_deepspeed_without_rollouts(monkeypatch):
    import deepspeed.runtime

    monkeypatch.delattr(deepspeed.runtime, "rollout", raising=False)
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.rollout", None)
    with pytest.raises(ThreestepError, match="--rollout_engine hybrid needs a DeepSpeed version with .*or use"):
        HybridRollout()


def test_what_it_does_not_support():
    mistakes = Mistakes()
    assert checked_engine("hybrid", {"min_p": 0.0, "bad_words": [], "stop": ["x"]}, mistakes) is HybridRollout
    assert mistakes.sentences == []
    checked_engine("hybrid", {"min_p": 0.1, "bad_words": ["x"]}, mistakes)
    assert mistakes.sentences == [
        "--rollout_engine hybrid does not support --min_p 0.1; remove it, or use another engine",
        "--rollout_engine hybrid does not support --bad_words ['x']; remove it, or use another engine",
    ]


def test_an_engine_that_only_pads_refuses_who_cannot():
    model, own = known("llama")
    assert HybridRollout().check(nullcontext(model), own) == []
    model, own = known("rwkv+unscaled")
    with pytest.raises(ThreestepError, match="--rollout_engine hybrid uses .* RwkvForCausalLM cannot: .* hf"):
        HybridRollout().check(nullcontext(model), own)
