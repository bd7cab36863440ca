"""vLLM's responses to prompts with images beside those of the transformers engine, in float32 on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support import vision_models
from tests.support.vision_models import FAMILIES, IMAGE_ID, Family, awake
from tests.unit.utils.generation.decoding.test_hf import responses
from threestep.plugins.images.pixels import ImagePixels
from threestep.plugins.images.tests.models.test_pictured_prompts import SAMPLES, SAMPLING, request_of, row_images
from threestep.plugins.vllm.engine import VllmRollout
from threestep.plugins.vllm.tests.vllm.conftest import started
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import plain
from training.utils.contracts.rollout import Rollout
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling, rolled_out
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.layout.rows import laid_out
from training.utils.models.own_forward import read_own_forward
from training.utils.models.token_model import PolicyModel

GREEDY = replace(SAMPLING, temperature=0.0)
# Attention on a CPU knows heads of 32 numbers and more.
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
WIDE_SECTIONS = [4, 6, 6]
TOLERANCE = 2e-5  # of log-probabilities in float32
# As published ones: vLLM does not read `vision_aspect_ratio`. Nothing is made smaller, as in LLaVA-NeXT.
NINE = "llava_onevision of nine tiles at most"
# What vLLM's CPU build computes otherwise: images that see themselves, and another `vision_aspect_ratio`.
OTHERWISE = {"gemma3": "Gemma3For", "llava_onevision": "LlavaOnevisionFor"}


class Single(Family):
    """With pixels in float32, as processors make them."""

    def pixels(self, keys) -> ImagePixels:
        made = super().pixels(keys)
        return replace(made, values=made.values.float())


def single(name: str) -> Single:
    with pytest.MonkeyPatch.context() as patch:
        for key, value in WIDE.items():
            patch.setitem(vision_models.TEXT, key, value)
        patch.setitem(vision_models.QWEN_ROPE, "mrope_section", WIDE_SECTIONS)
        made = awake(FAMILIES[name.split()[0]]())
        if name == NINE:
            made.model.config.vision_aspect_ratio = "anyres_max_9"
            made = replace(made, sides=FAMILIES["llava_next"]().sides)
    made.model.float()
    return Single(**vars(made))


@pytest.fixture(scope="module", params=[*(name for name in FAMILIES if name not in OTHERWISE), NINE])
def pair(request) -> Iterator[tuple[VllmRollout, Single]]:
    """An engine that has started, and a model of its family."""
    yield started(), single(request.param)


@pytest.fixture(scope="module")
def qwen2() -> tuple[VllmRollout, Single]:
    return started(), single("qwen2_vl")


def draw(engine: Any, family: Single, how: Sampling = SAMPLING) -> Rollout:
    return rolled_out(engine, family.model, request_of(family, how))


def test_greedy_rollouts_are_those_of_hf(pair):
    engine, family = pair
    expected, got = draw(TransformersRollout(), family, GREEDY), draw(engine, family, GREEDY)
    assert responses(got) == responses(expected)
    torch.testing.assert_close(got.sampled_logprobs_BR, expected.sampled_logprobs_BR, rtol=0, atol=TOLERANCE)
    assert torch.equal(got.prompt_ids_BP, expected.prompt_ids_BP) and got.media == expected.media


def test_logprobs_are_the_training_forwards(pair):
    engine, family = pair
    rollout = draw(engine, family)
    assert not (rollout.response_ids_BR == IMAGE_ID).any()
    read, images = PolicyModel(family.model), row_images(family)
    with torch.no_grad():
        for row, sequence in enumerate(rollout.sequences()):
            rows = laid_out([[plain(sequence)]], 0, images if sequence.media else None)
            sampled_R = rollout.sampled_logprobs_BR[row]
            torch.testing.assert_close(sampled_R, read(rows).logprobs_M, rtol=0, atol=TOLERANCE)


def test_the_check_before_training_passes_and_sees_other_weights(pair):
    engine, family = pair
    own = read_own_forward(family.model, 0, row_images(family))
    assert engine.check(nullcontext(family.model), own) == []
    tower = next(weight for weight in family.tower.parameters() if weight.dim() > 1)
    before = tower.detach().clone()
    tower.data.neg_()
    said = f"vLLM does not process images as {type(family.model).__name__} does: its log-probabilities differ by "
    with pytest.raises(ThreestepError, match=said):
        engine.check(nullcontext(family.model), own)
    tower.data.copy_(before)
    assert engine.check(nullcontext(family.model), own) == []


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_vllm_computes_otherwise_is_refused_before_training(name):
    family = single(name)
    own = read_own_forward(family.model, 0, row_images(family))
    with pytest.raises(
        ThreestepError, match=f"^vLLM does not process images as {OTHERWISE[name]}.*use --rollout_engine"
    ):
        started().check(nullcontext(family.model), own)


def request_with(family: Single, *pictures: int, samples: int = SAMPLES) -> RolloutRequest:
    """Prompts of the same 36 tokens, more than a cache block, each with one picture of the same size."""
    first = vision_models.sequence(family, 26, "image 3", 6, seed=5)
    spans = tuple((replace(first.media[0], key=key),) for key in pictures)
    images = row_images(family).of_prompts(spans)
    ids_BP = first.input_ids.repeat(len(pictures), 1)
    seeds = list(range(len(pictures) * samples))
    return RolloutRequest(ids_BP, torch.ones_like(ids_BP).bool(), GREEDY, seeds, samples, media=images)


@pytest.fixture
def alike(qwen2) -> tuple[VllmRollout, Single]:
    """Pictures 3 and up have the same size."""
    engine, family = qwen2
    return engine, replace(family, sides=(*family.sides[:3], *[(2, 2)] * 6))


def test_equal_prompts_with_other_pictures_share_no_cache(alike):
    engine, family = alike
    together = engine.roll_out(family.model, request_with(family, 3, 4, 3, 5))
    found = [tuple(response) for response in responses(together)]
    alone = [responses(engine.roll_out(family.model, request_with(family, key))) for key in (3, 4, 3, 5)]
    assert found == [tuple(response) for own in alone for response in own]
    logprobs_BR = together.sampled_logprobs_BR
    torch.testing.assert_close(logprobs_BR[:2], logprobs_BR[4:6], rtol=0, atol=1e-5)
    assert (logprobs_BR[0] - logprobs_BR[2]).abs().max() > 1e-3 < (logprobs_BR[0] - logprobs_BR[6]).abs().max()


def test_samples_share_a_prompt_and_its_picture(alike, monkeypatch):
    """36 tokens, a block of 32 of which all samples share; the tower sees two pictures once each."""
    engine, family = alike
    engine.roll_out(family.model, request_with(family, 3))  # it has started
    core = engine._vllm.llm.llm_engine.engine_core.engine_core
    schedule, counts = core.scheduler.schedule, []

    def counted(*words):
        scheduled = schedule(*words)
        counts.append(
            (scheduled.total_num_scheduled_tokens, sorted(map(len, scheduled.scheduled_encoder_inputs.values())))
        )
        return scheduled

    monkeypatch.setattr(core.scheduler, "schedule", counted)
    engine.roll_out(family.model, request_with(family, 3, 4, samples=4))
    assert counts[0] == (2 * (36 + 3 * 4), [1, 1])
    assert all(encoded == [] for _, encoded in counts[1:])


def test_new_weights_of_the_tower_are_seen_at_once(alike):
    """vLLM keeps a picture's features, by its hash, through new weights."""
    engine, family = alike
    before = engine.roll_out(family.model, request_with(family, 3, 4)).sampled_logprobs_BR
    weight = family.model.model.visual.merger.mlp[2].weight
    weight.data.neg_()
    engine._vllm.hold(family.model)
    after = engine.roll_out(family.model, request_with(family, 3, 4))
    expected = TransformersRollout().roll_out(family.model, request_with(family, 3, 4))
    weight.data.neg_()
    assert responses(after) == responses(expected)
    torch.testing.assert_close(after.sampled_logprobs_BR, expected.sampled_logprobs_BR, rtol=0, atol=TOLERANCE)
    assert (after.sampled_logprobs_BR - before).abs().max() > 1e-3


def test_other_tokens_than_the_prompts_are_told(alike, monkeypatch):
    from threestep.plugins.vllm import turns as vllm_turns

    engine, family = alike
    whole = vllm_turns.engine_prompt
    monkeypatch.setattr(vllm_turns, "engine_prompt", lambda kind, ids, images: whole(kind, [*ids, 7], images))
    with pytest.raises(ThreestepError) as told:
        engine.roll_out(family.model, request_with(family, 3))
    assert str(told.value) == (
        "vLLM encoded a prompt of 36 tokens as 37: it processes images differently from training; "
        "use --rollout_engine hf"
    )
