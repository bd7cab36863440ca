"""In which way families are decoded: the fastest that gives plain transformers' log-probabilities."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.families.builds import draw_weights
from tests.families.configs import tiny_config
from tests.families.subjects import true_logprobs
from tests.unit.utils.generation.decoding.test_hf import PLAIN, prompts, responses, roll, shapes_of_inputs, spelt
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rollout import Rollout
from training.utils.contracts.rollout_engine import Ends, RolloutRequest
from training.utils.generation.decoding import decode_check
from training.utils.generation.decoding.decode_check import fitting_way, why_not_decoded
from training.utils.generation.decoding.decoding import MASKED, NONE, OURS, OWN, WAYS, Decoding, of_one_length
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.models.document_attention import use_document_attention
from training.utils.models.own_forward import OwnForward, read_own_forward

# Family: (prompts of different lengths may be one batch, whose cache)
CASES = {
    "llama": (True, OURS),
    "gemma2": (True, OURS),  # windows
    "mamba": (True, OURS),
    "bloom": (True, OURS),
    "minicpm3": (True, OURS),  # values narrower than keys
    "minimax": (True, OWN),  # a cache class of its own
    "bart": (False, OURS),  # positions by the cache's length
    "openai-gpt": (False, NONE),  # it has no cache
    "recurrent_gemma": (False, NONE),  # its state is in its modules
    "rwkv+unscaled": (False, NONE),  # it knows no mask
}


def known(family: str, longest_tokens: int = 24) -> tuple[Any, OwnForward]:
    """A model, and what it computes before its attention is replaced, as it is loaded."""
    model = AutoModelForCausalLM.from_config(tiny_config(family)).eval()
    draw_weights(model, seed=0)
    own = read_own_forward(model, longest_tokens)
    use_document_attention(model)
    return model, own


@pytest.mark.parametrize("family", CASES)
def test_rollouts_are_drawn_from_the_models_own_log_probabilities(family):
    model, own = known(family)
    engine = TransformersRollout()
    notes = engine.check(nullcontext(model), own)
    assert (engine._way.padded, engine._way.cache) == CASES[family]
    assert bool(notes) == (engine._way not in (MASKED, WAYS[0]))
    assert engine._way.masks_are_ours == (family in ("llama", "gemma2", "minicpm3"))
    ids_BP, mask_BP = prompts((3, 9, 5, 3), seed=5)
    request = RolloutRequest(ids_BP, mask_BP, replace(PLAIN, end_token_id=-1), list(range(8)), 2)
    frequent = engine.roll_out(model, request).response_ids_BR[:, 1:-3].flatten().bincount().argmax()
    rollout = engine.roll_out(model, replace(request, sampling=replace(PLAIN, end_token_id=int(frequent))))
    assert len(rollout.response_lengths_B.unique()) > 1  # rows have left on the way
    for row, sequence in enumerate(rollout.sequences()):
        truth_M = true_logprobs(model, [sequence])
        recorded_M = rollout.sampled_logprobs_BR[row, : len(truth_M)].double()
        torch.testing.assert_close(recorded_M, truth_M, rtol=0, atol=2e-4)


def test_a_slower_way_is_told_with_the_reasons():
    model, own = known("openai-gpt")
    way, notes = fitting_way(model, own)
    assert way == WAYS[-1] and len(notes) == len(WAYS)
    assert "one batch: its forward fails (RuntimeError: " in notes[0]
    assert notes[-1].startswith("warning: OpenAIGPTLMHeadModel rolls out prompts of one length at a time without a")


@pytest.mark.parametrize("longest_tokens", [0, 40])
def test_the_usual_way_takes_few_forwards(longest_tokens):
    model, own = known("gemma2", longest_tokens)  # a window of 8
    way, seen = shapes_of_inputs(model, lambda: fitting_way(model, own))
    assert way == (MASKED, []) and len(seen) <= 8
    assert seen[0] == (4, 32 if longest_tokens else 9)


class _Forgetful(Decoding):
    """Rows that leave take the cache of others with them."""

    def drop(self, token_A: torch.Tensor, over: list[bool]) -> torch.Tensor:
        kept = [row for row, gone in enumerate(over) if not gone]
        if len(kept) < len(over):
            self.cache.reorder_cache(torch.arange(len(kept)))
            self.mask, self.position_ids = self.mask[: len(kept)], self.position_ids[: len(kept)]
            self.rows_A = self.rows_A[kept]
        return token_A[kept]


def test_a_row_that_takes_anothers_cache_is_found(monkeypatch):
    monkeypatch.setattr("training.utils.generation.decoding.decode_check.Decoding", _Forgetful)
    model, own = known("llama")
    assert "its log-probabilities differ by " in (why_not_decoded(model, own, WAYS[0]) or "")


@pytest.mark.parametrize("way", [MASKED, *WAYS], ids=lambda way: way.words)
def test_every_way_draws_the_same_tokens(way):
    """Also with stop strings, banned words and rows that end; and one prompt token by token."""

    class InThisWay(TransformersRollout):
        _way = way

    model, _ = known("llama")
    ids_BP, mask_BP = prompts()
    how = replace(PLAIN, end_token_id=40, ends=Ends((spelt([17]),)), bad_words=((5,), (6, 7)), top_p=0.95)
    request = RolloutRequest(ids_BP, mask_BP, how, list(range(16)), 2)
    expected: Rollout = roll(model, how, samples=2, decode=spelt)
    got = InThisWay(spelt).roll_out(model, request)
    assert responses(got) == responses(expected) and len(set(got.response_lengths_B.tolist())) > 2
    for name in ("prompt_ids_BP", "prompt_mask_BP", "response_ids_BR", "response_lengths_B", "ended_B"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    torch.testing.assert_close(got.sampled_logprobs_BR, expected.sampled_logprobs_BR, rtol=0, atol=2e-4)
    one = RolloutRequest.of_prompt(ids_BP[1], PLAIN, 3)
    assert list(InThisWay().stream(model, one, ())) == list(TransformersRollout().stream(model, one, ()))
    assert torch.equal(ids_BP, prompts()[0])  # the request is as it was


def test_prompts_of_one_length():
    ids_BP, mask_BP = prompts((3, 5, 3))
    parts = list(of_one_length(RolloutRequest(ids_BP, mask_BP, PLAIN, list(range(10, 16)), 2)))
    assert [rows for rows, _ in parts] == [[0, 1, 4, 5], [2, 3]]
    assert [list(part.seeds) for _, part in parts] == [[10, 11, 14, 15], [12, 13]]
    assert torch.equal(parts[0][1].prompt_ids_BP, ids_BP[[0, 2], 2:]) and bool(parts[0][1].prompt_mask_BP.all())


def test_a_copy_that_computes_something_else_is_refused():
    model, own = known("llama")
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    with pytest.raises(
        ThreestepError, match="of the weights used in rollouts differ from those of the loaded weights by"
    ):
        TransformersRollout().check(nullcontext(model), own)


def test_a_model_that_cannot_be_decoded_is_refused(monkeypatch):
    model, own = known("llama")
    monkeypatch.setattr(
        "training.utils.generation.decoding.decode_check.why_not_decoded",
        lambda *_: "its forward fails (ValueError: no)",
    )
    with pytest.raises(
        ThreestepError, match="LlamaForCausalLM cannot roll out prompts of one length .*; faster ways fail too"
    ):
        TransformersRollout().check(nullcontext(model), own)


def test_a_sequence_that_is_too_long_to_pad_others_to_is_left_out(monkeypatch):
    """Its mask would be quadratic; the others are read, and a wrong one of theirs is found."""
    model, own = known("llama", 40)
    assert own.probes.long is not None
    monkeypatch.setattr(decode_check, "_MOST_TOKENS", 39)
    way, seen = shapes_of_inputs(model, lambda: fitting_way(model, own))
    assert way == (MASKED, []) and seen[0] == (4, 9)
    wrong = replace(own, numbers_M=own.numbers_M - 1.0)
    assert why_not_decoded(model, wrong, MASKED) is not None
