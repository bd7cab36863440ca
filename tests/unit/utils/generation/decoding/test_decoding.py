"""Prompts that several forwards read, a part each, are those that one forward reads, without a mask of T x T."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from tests.unit.utils.generation.decoding.test_decode_check import known
from tests.unit.utils.generation.decoding.test_hf import PLAIN, prompts, responses, shapes_of_inputs
from training.utils.contracts.rollout_engine import RolloutRequest, RolloutSettings
from training.utils.generation.decoding.decoding import MASKED, OURS, OWN, WAYS, DecodeWay, Decoding
from training.utils.generation.decoding.hf import TransformersRollout

PADDED = (3, 23, 1, 7, 17, 9, 2, 4)  # longer than a window of 8; the beginning of most is padding


def engine_of(prefill_tokens: int, longest_tokens: int = 64) -> TransformersRollout:
    engine = TransformersRollout.create(None, RolloutSettings(longest_tokens))
    engine._prefill_tokens = prefill_tokens
    return engine


# gpt2: learned positions; gemma2: windows of 8 in every second layer; gemma3_text: masks by kind of layer.
@pytest.mark.parametrize("part", [1, 4, 9])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gemma3_text"])
def test_parts_leave_the_keys_and_logits_of_one_forward(family, part):
    """In float64, to its rounding."""
    model, batch = tiny_causal_lm(family, torch.float64), prompts(PADDED)
    request = RolloutRequest(*batch, PLAIN, list(range(len(PADDED))))
    whole, parts = (Decoding(model, request, MASKED, prefill_tokens=most) for most in (None, part))
    with torch.no_grad():
        wanted_BV, (got_BV, seen) = whole.prefill(1), shapes_of_inputs(model, lambda: parts.prefill(1))
    assert [width for _, width in seen] == [part] * (23 // part) + [23 % part] * (23 % part > 0)
    torch.testing.assert_close(got_BV, wanted_BV, rtol=0, atol=1e-6)  # logits are float32
    for own, other in zip(parts.cache.layers, whole.cache.layers, strict=True):
        assert own.get_seq_length() == other.get_seq_length() == 23
        seen_BT = batch[1][:, 23 - own.keys.shape[2] :]
        for got, wanted in ((own.keys, other.keys), (own.values, other.values)):
            torch.testing.assert_close(
                got.transpose(1, 2)[seen_BT], wanted.transpose(1, 2)[seen_BT], rtol=0, atol=1e-13
            )


@pytest.mark.parametrize("way", [WAYS[0], MASKED], ids=["theirs", "ours"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_rollouts_are_those_of_one_forward(family, way):
    """In float32: the same tokens, and log-probabilities up to rounding; rows of samples and rows that leave."""
    model = tiny_causal_lm(family)
    request = RolloutRequest(*prompts(PADDED), PLAIN, list(range(16)), samples_per_prompt=2)
    request = replace(request, sampling=replace(PLAIN, end_token_id=11))
    engines = engine_of(4096), engine_of(5)
    for engine in engines:
        engine._way = way
    wanted, got = (engine.roll_out(model, request) for engine in engines)
    assert responses(got) == responses(wanted)
    torch.testing.assert_close(got.sampled_logprobs_BR, wanted.sampled_logprobs_BR, rtol=0, atol=2e-5)
    plain = TransformersRollout()
    plain._way = way
    assert torch.equal(wanted.sampled_logprobs_BR, plain.roll_out(model, request).sampled_logprobs_BR)


class _Largest(TorchDispatchMode):
    """numbers: of the largest tensor that an operator returns."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor):
            self.numbers = max(self.numbers, output.numel())
        return output


@pytest.mark.parametrize("prefill_tokens", [512, 16])
def test_no_tensor_has_the_square_of_a_prompt(prefill_tokens):
    model, tokens = tiny_causal_lm("llama"), 200
    ids_P = torch.randint(3, VOCABULARY, (tokens,), generator=torch.Generator().manual_seed(1))
    padded = torch.nn.functional.pad(ids_P, (1, 0)).unsqueeze(0)  # without padding transformers makes no mask
    request = RolloutRequest(padded, padded > 0, replace(PLAIN, max_new_tokens=2), [0])
    with _Largest() as largest:
        engine_of(prefill_tokens).roll_out(model, request)
    assert (largest.numbers < tokens**2) == (prefill_tokens < tokens)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama", None),
        ("gemma2", None),
        ("mamba", "its cache has a custom layer type (LinearAttentionLayer)"),
        ("bart", "it rolls out prompts of one length at a time"),
    ],
)
def test_families_whose_cache_cannot_go_on_are_named_and_read_prompts_whole(family, reason):
    model, own = known(family)
    engine = engine_of(4, 24)
    notes = engine.check(nullcontext(model), own)
    said = f"warning: {type(model).__name__} reads each prompt in one forward, instead of 4 tokens at a time: {reason}"
    assert (said in notes) == (reason is not None)
    engine_of(24, 24).check(nullcontext(model), own)  # no prompt can be so long: nothing is checked
    short = engine_of(24, 24)
    assert said not in short.check(nullcontext(model), own)
    if reason is None or family == "mamba":
        _, seen = shapes_of_inputs(
            model, lambda: engine.roll_out(model, RolloutRequest(*prompts(), PLAIN, list(range(8))))
        )
        assert seen[0][1] == (4 if reason is None else 11)


def test_parts_that_give_other_numbers_are_found(monkeypatch):
    """A family that counts positions by the tokens of a forward."""
    model, own = known("llama")
    forward = Decoding.forward

    def from_zero(decoding, input_ids, mask, position_ids, of_media=None):
        fresh = torch.arange(input_ids.shape[1]).expand_as(position_ids)
        return forward(decoding, input_ids, mask, fresh if input_ids.shape[1] == 3 else position_ids, of_media)

    engine = engine_of(4, 24)
    monkeypatch.setattr(Decoding, "forward", from_zero)
    notes = engine.check(nullcontext(model), own)
    assert "instead of 4 tokens at a time: its log-probabilities differ by" in notes[-1]
    assert engine._prefill_tokens is None


def test_only_padded_prompts_with_our_cache_of_keys_are_read_in_parts():
    """Unchecked, as step 1's samples are drawn."""
    request = RolloutRequest.of_prompt(torch.arange(3, 13), PLAIN, 0)
    for family, way in (
        ("llama", DecodeWay(True, OWN, "")),
        ("llama", DecodeWay(False, OURS, "")),
        ("mamba", WAYS[0]),
    ):
        model = tiny_causal_lm(family)
        decoding = Decoding(model, request, way, prefill_tokens=4)
        with torch.no_grad():
            _, seen = shapes_of_inputs(model, lambda: decoding.prefill(1))  # noqa: B023 - called at once
        assert seen == [(1, 10)]
