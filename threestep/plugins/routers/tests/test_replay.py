"""Replay of routers: against plain float64 PyTorch written from the paper, and who follows."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import linear, silu, softmax

from tests.support.tiny_models import tiny_causal_lm
from tests.unit.utils.generation.decoding.test_hf import PAD, PLAIN, prompts
from threestep.plugins.routers.replay import check_replay, open_replay, with_experts
from threestep.plugins.routers.tests.test_routers import run, tiny
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import shared_prompt, unshared
from training.utils.contracts.rollout_engine import RolloutRequest
from training.utils.generation.decoding.decoding import MASKED, WAYS
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.layout.rows import packed_rows, padded_rows
from training.utils.models.token_model import PolicyModel

FOLLOWING = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe"]


def opened(family: str, how: str = "follow", dtype: torch.dtype = torch.float64, **changes: Any):
    changes = {"sliding_window": None, **changes} if family in ("mixtral", "qwen3_moe") else changes
    model = tiny(family, **changes).to(dtype)
    model.set_attn_implementation("sdpa")
    if dtype == torch.float64:  # for which the grouped matrix products are not there
        model.set_experts_implementation("eager")
    replay = open_replay(model, how)
    assert replay is not None
    return model, replay, PolicyModel(model)


def one_row(tokens: int):
    return padded_rows([replace(run(tokens, 1, True), is_target=torch.arange(tokens) > 0)], 0)


def planted(rows, replay, seed: int = 0) -> torch.Tensor:
    """Another choice than the model's own for each slot, drawn at random without repetition."""
    with torch.no_grad(), replay.recorded(replay.model) as last:
        PolicyModel(replay.model)(rows)
        own_tLK = last()
    noise = torch.rand((*own_tLK.shape[:2], 4), generator=torch.Generator().manual_seed(seed))
    return noise.topk(own_tLK.shape[2]).indices.to(torch.int16)


def plain_mixture(block: torch.nn.Module, hidden_tH: torch.Tensor, chosen_tK: torch.Tensor) -> torch.Tensor:
    """R3: y = the sum over the chosen experts of E_i(x) exp(s_i) / (the sum of exp(s_j) over the chosen)."""
    scores_tE = linear(hidden_tH, block.gate.weight)
    weights_tK = softmax(scores_tE.gather(-1, chosen_tK), dim=-1)
    out_tH = torch.zeros_like(hidden_tH)
    for token in range(len(hidden_tH)):
        for weight, expert in zip(weights_tK[token], chosen_tK[token], strict=True):
            gate, up = linear(hidden_tH[token], block.experts.gate_up_proj[expert]).chunk(2)
            out_tH[token] = out_tH[token] + weight * linear(silu(gate) * up, block.experts.down_proj[expert])
    return out_tH


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_given_choice_is_that_of_plain_pytorch_and_its_gradient(recomputed):
    model, replay, policy = opened("mixtral", router_jitter_noise=0.0, attention_dropout=0.0)
    rows = one_row(7)
    rows = with_experts(rows, planted(rows, replay))
    reference = copy.deepcopy(model)
    for place, layer in enumerate(reference.model.layers):
        chosen_tK = rows.experts_NTLK.flatten(0, 1)[:, place].long()
        block = layer.mlp
        block.forward = lambda hidden, block=block, chosen_tK=chosen_tK: plain_mixture(
            block, hidden.flatten(0, 1), chosen_tK
        ).view_as(hidden)
    if recomputed:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    loss = policy(rows).logprobs_M.sum()
    if recomputed:  # another forward before the backward does not disturb it
        policy(with_experts(rows, planted(rows, replay, seed=5)))
    loss.backward()
    logits = reference(rows.input_ids_NT).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, rows.input_ids_NT[0, 1:, None]).sum()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)  # log-probabilities are read in float32
    for (name, weight), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert weight.grad is not None and other.grad is not None, name
        torch.testing.assert_close(weight.grad, other.grad, rtol=1e-5, atol=1e-6, msg=name)
    assert float(model.model.layers[0].mlp.gate.weight.grad.abs().max()) > 0  # the router learns


@pytest.mark.parametrize("family", FOLLOWING)
def test_ones_own_choice_is_the_identity_to_the_bit(family):
    model, replay, policy = opened(family, dtype=torch.float32)
    check_replay(replay, lambda part: policy(part).logprobs_M, one_row(6), 1e-5)
    assert all(not layer.__dict__["_threestep_experts"].keeps for layer in replay.model.model.layers)
    document = shared_prompt(run(5, 1, False), [run(3, 2, True), run(4, 3, True)])
    rows = packed_rows([[document]], 0)
    with torch.no_grad(), replay.recorded(model) as last:
        free_M = policy(rows).logprobs_M
        given = with_experts(rows, last())
        assert torch.equal(policy(given).logprobs_M, free_M)
        assert replay.differing().sum() == 0 and replay.differing() is None
        other = with_experts(rows, planted(rows, replay))
        assert not torch.equal(policy(other).logprobs_M, free_M)
        assert replay.differing().sum() > 0
        assert torch.equal(policy(rows).logprobs_M, free_M)  # nothing stays


@pytest.mark.parametrize("family", FOLLOWING)
def test_any_layout_follows_alike(family):
    model, replay, policy = opened(family)
    document = shared_prompt(run(5, 1, False), [run(3, 2, True), run(4, 3, True)])
    packed = packed_rows([[document]], 0)
    given = planted(packed, replay)
    parts = given.split([5, 3, 4])
    segments = tuple(
        replace(part, tokens=replace(part.tokens, experts=own))
        for part, own in zip(document.segments, parts, strict=True)
    )
    document = replace(document, segments=segments)
    layouts = [[[document]], [[each] for each in unshared(document)], [unshared(document)]]
    with torch.no_grad():
        read = [policy(packed_rows(layout, 0)).logprobs_M for layout in layouts]
        free_M = policy(packed).logprobs_M
    for other in read[1:]:
        torch.testing.assert_close(other, read[0], rtol=0, atol=1e-6)
    assert float((free_M - read[0]).abs().max()) > 1e-3


def test_a_choice_that_is_compared_is_not_taken():
    model, replay, policy = opened("mixtral", "compare")
    rows = one_row(7)
    with torch.no_grad(), replay.recorded(model) as last:
        free_M = policy(rows).logprobs_M
        own_tLK = last()
        other = own_tLK.clone()
        other[2, 1] = torch.tensor([3, 2]) if set(own_tLK[2, 1].tolist()) != {2, 3} else torch.tensor([0, 1])
        other[4] = other[4].flip(-1)  # the same set
        other[5] = -1  # unknown
        assert torch.equal(policy(with_experts(rows, other)).logprobs_M, free_M)
    assert replay.differing().tolist() == [False, False, True, False, False, False, False]


def test_unknown_choices_are_the_models_own():
    model, replay, policy = opened("mixtral")
    rows = one_row(6)
    given = planted(rows, replay)
    unknown = torch.full_like(given, -1)
    with torch.no_grad():
        assert torch.equal(policy(with_experts(rows, unknown)).logprobs_M, policy(rows).logprobs_M)
        half = torch.cat([given[:3], unknown[3:]])
        some_M = policy(with_experts(rows, half)).logprobs_M
        assert not torch.equal(some_M, policy(rows).logprobs_M)
        assert not torch.equal(some_M, policy(with_experts(rows, given)).logprobs_M)


def test_who_is_refused():
    assert open_replay(tiny_causal_lm("llama"), "none") is None
    with pytest.raises(ThreestepError, match=r"--replay_routers follow needs a mixture of experts .* Llama"):
        open_replay(tiny_causal_lm("llama"), "follow")
    rows = one_row(6)
    _, replay, policy = opened("mixtral", dtype=torch.float32, num_experts_per_tok=4)
    with pytest.raises(ThreestepError, match="MixtralForCausalLM does not use .*: every token goes to every expert"):
        check_replay(replay, lambda part: policy(part).logprobs_M, rows, 1e-5)
    _, replay, policy = opened("mixtral", dtype=torch.float32)
    with pytest.raises(ThreestepError, match="a different choice does not change its log-probabilities"):
        check_replay(replay, lambda part: policy(part.of_free_experts()).logprobs_M, rows, 1e-5)
    with pytest.raises(ThreestepError, match="replaying its own choice changes its log-probabilities"):
        wrong = iter([0.0, 1.0, 2.0])
        check_replay(replay, lambda part: policy(part).logprobs_M + next(wrong), rows, 1e-5)
    layer = replay.model.model.layers[0].mlp
    own = layer.gate.forward
    layer.gate.forward = lambda hidden: (torch.topk(hidden, 2), own(hidden))[1]
    with pytest.raises(ThreestepError, match=r"layers choose them with 2 calls of torch.topk"):
        check_replay(replay, lambda part: policy(part).logprobs_M, rows, 1e-5)


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
