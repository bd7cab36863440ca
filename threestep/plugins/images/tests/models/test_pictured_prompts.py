"""Rollouts of prompts with images: each token's log-probability is that of the model's own forward of the sequence, and
a prompt's images are computed once for all of its samples."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from tests.support.vision_models import FAMILIES, IMAGE_ID, Family, answers, awake, gemma3, sequence
from threestep.plugins.images.kept_features import KeptFeatures
from threestep.plugins.images.models.kept_features import open_feature_reader
from threestep.plugins.images.models.pictured import RowImages
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import TokenSequence, plain, together
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling, rolled_out
from training.utils.generation.decoding import decoding
from training.utils.generation.decoding.decode_check import fitting_way, why_not_decoded
from training.utils.generation.decoding.decoding import FIXED, MASKED, WAYS, DecodeWay, of_one_length, prompt_inputs
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.layout.rows import laid_out
from training.utils.models.attention_choice import settle_attention
from training.utils.models.own_forward import OwnForward, read_own_forward
from training.utils.models.token_model import PolicyModel

SAMPLES = 2
SAMPLING = Sampling(6, 1.0, 0, 1.0, end_token_id=-1, pad_token_id=0, bad_words=((IMAGE_ID,),))
# One image between texts, a text, two images one of which ends the prompt, and one at the very beginning.
SHAPES: tuple[tuple[int | str, ...], ...] = ((2, "image 0", 3), (5,), (1, "image 1", 2, "image 2"), ("image 3", 4))


def prompts_of(family: Family) -> list[TokenSequence]:
    return [sequence(family, *shape, seed=index) for index, shape in enumerate(SHAPES)]


def row_images(family: Family) -> RowImages:
    one = together([sequence(family, 2, "image 2", 3, seed=8), *answers(family, 4)])
    two = together([sequence(family, 1, "image 0", 2, "image 1", seed=9), *answers(family, 3)])
    return RowImages(family.pixels, (plain(one), plain(two)))


def request_of(family: Family, sampling: Sampling = SAMPLING) -> RolloutRequest:
    prompts = prompts_of(family)
    flipped = [prompt.input_ids.flip(0) for prompt in prompts]
    ids_BP = pad_sequence(flipped, batch_first=True, padding_value=0).flip(1)
    mask_BP = pad_sequence([torch.ones(len(ids)).bool() for ids in flipped], batch_first=True).flip(1)
    images = row_images(family).of_prompts([prompt.media for prompt in prompts])
    return RolloutRequest(ids_BP, mask_BP, sampling, list(range(len(prompts) * SAMPLES)), SAMPLES, media=images)


NARROW = "gemma3 with a window"
MAKE = {**FAMILIES, NARROW: lambda: gemma3(window=5)}


def known(name: str) -> tuple[Family, OwnForward]:
    """A family as it is loaded: its own forward is measured before its attention is replaced."""
    family = awake(MAKE[name]())
    own = read_own_forward(family.model, 0, row_images(family))
    settle_attention(family.model, own, "auto", None, compiled=False)
    return family, own


@pytest.mark.parametrize("name", MAKE)
def test_rollouts_are_drawn_from_the_models_own_log_probabilities(name):
    family, own = known(name)
    engine = TransformersRollout()
    assert engine.check(nullcontext(family.model), own) == []
    frequent = engine.roll_out(family.model, request_of(family)).response_ids_BR[:, 1:-2].flatten().bincount().argmax()
    tower_calls: list[Any] = []
    hook = family.tower.register_forward_hook(lambda *_: tower_calls.append(1))
    rollout = rolled_out(engine, family.model, request_of(family, replace(SAMPLING, end_token_id=int(frequent))))
    hook.remove()
    assert len(tower_calls) == 1 and len(rollout.response_lengths_B.unique()) > 1  # rows have left on the way
    assert not (rollout.response_ids_BR == IMAGE_ID).any()
    read, images = PolicyModel(family.model), row_images(family)
    plainly = awake(MAKE[name]())
    for row, found in enumerate(rollout.sequences()):
        assert found.media == prompts_of(family)[row // SAMPLES].media
        sampled_r = rollout.sampled_logprobs_BR[row, : int(rollout.response_lengths_B[row])].double()
        with torch.no_grad():
            own_r = plainly.own_logprobs(plain(found))
            trained_r = read(laid_out([[plain(found)]], 0, images)).logprobs_M
        torch.testing.assert_close(sampled_r, own_r, rtol=0, atol=3e-6)
        torch.testing.assert_close(trained_r.double(), own_r, rtol=0, atol=3e-6)


@pytest.mark.needs_plugin("captured")
@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3"])
def test_every_padded_way_reads_images_and_no_other_does(name):
    family, own = known(name)
    assert [why_not_decoded(family.model, own, way) for way in (FIXED, MASKED, *WAYS[:2])] == [None] * 4
    reason = why_not_decoded(awake(FAMILIES["llava"]()).model, known("llava")[1], WAYS[2])
    assert reason == "it gets no positions, which prompts with images need"


def counted_on(model: Any, request: RolloutRequest, accepted: Any) -> Any:
    """Positions behind a prompt count its tokens."""
    made = prompt_inputs(model, request, accepted)
    return replace(made, last_B1=request.prompt_mask_BP.sum(1, keepdim=True) - 1)


def one_way(model: Any, request: RolloutRequest, accepted: Any) -> Any:
    """No token of an image sees a later one."""
    return prompt_inputs(model, request, set(accepted) - {"token_type_ids"})


def in_another_order(model: Any, request: RolloutRequest, accepted: Any) -> Any:
    """The images of one prompt are those of another."""
    made = prompt_inputs(model, request, accepted)
    if "pixel_values" not in made.of_media:
        return made
    return replace(made, of_media={**made.of_media, "pixel_values": made.of_media["pixel_values"].flip(0)})


@pytest.mark.parametrize(
    ("name", "wrong"), [("qwen2_vl", counted_on), ("gemma3", one_way), ("llava", in_another_order)]
)
def test_the_check_finds_what_is_wrong_with_images_alone(name, wrong, monkeypatch):
    family, own = known(name)
    monkeypatch.setattr(decoding, "prompt_inputs", wrong)
    reason = why_not_decoded(family.model, own, MASKED)
    assert reason is not None and reason.startswith("for prompts with images, its log-probabilities differ by ")
    with pytest.raises(ThreestepError, match="cannot roll out prompts of one length at a time without a cache: "):
        fitting_way(family.model, own)


def test_a_way_without_padding_takes_the_images_and_texts_are_given_what_they_were():
    family = FAMILIES["llava"]()
    request = request_of(family)
    for rows, part in of_one_length(request):
        assert part.media.spans == tuple(request.media.spans[row // SAMPLES] for row in rows[::SAMPLES])
    family = FAMILIES["gemma3"]()
    request = replace(request_of(family), media=None)
    made = prompt_inputs(family.model, request, {"token_type_ids"})
    assert made.of_media == {} and made.position_ids[1].tolist()[-5:] == [0, 1, 2, 3, 4]
    assert made.last_B1.flatten().tolist() == [len(prompt) - 1 for prompt in prompts_of(family)]
    assert isinstance(MASKED, DecodeWay)


@pytest.mark.parametrize("name", ["llava", "gemma3", "smolvlm"])
def test_rollouts_read_features_that_are_kept(name):
    """The same tokens, in every way that reads images, and the tower runs for new pictures alone."""
    family, own = known(name)
    family.tower.requires_grad_(False)
    assert open_feature_reader(family.model, family.pixels([0])) is None
    store = KeptFeatures(2**20)
    tower_calls: list[Any] = []
    family.tower.register_forward_hook(lambda *_: tower_calls.append(1))
    request = request_of(family)
    for way in WAYS[:2]:
        engine = TransformersRollout()
        engine._way = way
        plainly = rolled_out(engine, family.model, request)
        tower_calls.clear()
        found = rolled_out(engine, family.model, replace(request, media=replace(request.media, kept=store)))
        assert len(tower_calls) == (len(store) if way is WAYS[0] else 0) and len(store) > 1
        assert torch.equal(found.response_ids_BR, plainly.response_ids_BR)
        torch.testing.assert_close(found.sampled_logprobs_BR, plainly.sampled_logprobs_BR, rtol=0, atol=3e-6)
