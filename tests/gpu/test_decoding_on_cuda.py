"""Decoding on a GPU: captured graphs, looks at ends every few tokens and top-p in rounds draw what a CPU draws."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from tests.unit.utils.generation.decoding.test_hf import PLAIN, frequent_token, prompts, responses, roll
from threestep.plugins.captured.steps import CapturedStep
from training.utils.contracts.rollout_engine import RolloutRequest
from training.utils.generation.decoding.decoding import FIXED, MASKED, WAYS, DecodeWay
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.models.own_forward import read_own_forward

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def drawn(model, way: DecodeWay, how):
    class InThisWay(TransformersRollout):
        _way = way

    ids_BP, mask_BP = (part.to(model.device) for part in prompts())
    return InThisWay().roll_out(model, RolloutRequest(ids_BP, mask_BP, how, list(range(16)), 2))


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_captured_graphs_draw_what_plain_calls_draw(family, top_p):
    model = tiny_causal_lm(family)
    how = replace(PLAIN, max_new_tokens=200 if family == "llama" else 40, top_p=top_p, bad_words=((5,), (6, 7)))
    how = replace(how, max_new_tokens=min(how.max_new_tokens, 110))
    how = replace(how, end_token_id=frequent_token(roll(model, replace(how, max_new_tokens=12))))
    on_cpu = drawn(model, WAYS[0], how)
    model = model.to(CUDA)
    own = read_own_forward(model, 24)
    engine = TransformersRollout()
    assert engine.check(nullcontext(model), own) == [] and engine._way == FIXED
    plain, captured = drawn(model, MASKED, how), drawn(model, FIXED, how)
    assert responses(captured) == responses(plain) == responses(on_cpu)
    torch.testing.assert_close(captured.sampled_logprobs_BR, plain.sampled_logprobs_BR, rtol=0, atol=1e-4)
    torch.testing.assert_close(captured.sampled_logprobs_BR.cpu(), on_cpu.sampled_logprobs_BR, rtol=0, atol=1e-4)


def test_a_replay_reads_what_stands_in_its_places():
    place, weight = torch.zeros(4, 8, device=CUDA), torch.randn(8, 8, device=CUDA)
    first = CapturedStep(lambda: place @ weight, CUDA)
    second = CapturedStep(lambda: (place @ weight).relu(), CUDA, first)
    for seed in range(3):
        place.normal_(generator=torch.Generator(CUDA).manual_seed(seed))
        torch.testing.assert_close(second(), (place @ weight).relu())


def test_what_waits_is_refused_before_a_capture():
    """And nothing is left behind: the next capture works."""
    place = torch.ones(4, device=CUDA)
    with pytest.raises(RuntimeError, match="synchronizing"):
        CapturedStep(lambda: place * float(place.sum()), CUDA)
    assert CapturedStep(lambda: place * 2, CUDA)().tolist() == [2.0] * 4
