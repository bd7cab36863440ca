"""Models of images and text: packed rows with shared image prompts give what the model's own forward of each sequence
by itself gives, and its gradients; positions are the model's own; a shared image is computed once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.vision_models import FAMILIES, IMAGE_ID, answers, awake, gemma3, qwen2_vl, sequence, with_pixels
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import plain, shared_prompt, together, unshared
from training.utils.contracts.token_rows import position_axes
from training.utils.layout.rows import packed_rows
from training.utils.models.attention import BY_DOCUMENT, set_text_attention, text_attention
from training.utils.models.document_attention import use_document_attention
from training.utils.models.token_model import PolicyModel


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return awake(FAMILIES[request.param]())


@pytest.fixture(params=[BY_DOCUMENT, pytest.param("sdpa", marks=pytest.mark.long)])
def by_each_attention(request, family):
    if request.param == BY_DOCUMENT:
        use_document_attention(family.model)
    assert text_attention(family.model) == request.param
    yield
    set_text_attention(family.model, "sdpa")


@pytest.fixture
def rows_of_documents(family):
    """Two rows: prompts of one and of several images that responses share, a conversation with images in two turns, a
    text, and an image at the very beginning."""
    turns = sequence(family, 3, "image 3", 4, "image 2", 5)
    turns.is_target[-2:] = True
    text = shared_prompt(sequence(family, 6), answers(family, 3, 4))
    one = shared_prompt(sequence(family, 2, "image 0", 3), answers(family, 2, 5, 3))
    several = shared_prompt(sequence(family, "image 2", 1, "image 0", 2, "image 1", 2), answers(family, 4, 2))
    return [[one, text], [plain(turns), several]]


def packed(family, documents):
    rows = packed_rows(documents, 0)
    return with_pixels(rows, family.pixels([image.key for image in rows.media.spans]))


def gradients(model, loss):
    weights = dict(model.named_parameters())
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values()), allow_unused=True), strict=True))


@pytest.mark.usefixtures("by_each_attention")
def test_packed_rows_give_the_numbers_and_gradients_of_the_models_own_forward(family, rows_of_documents):
    policy = PolicyModel(family.model)
    own = [family.own_logprobs(alone) for row in rows_of_documents for document in row for alone in unshared(document)]
    read = policy(packed(family, rows_of_documents)).logprobs_M
    # transformers computes norms and rotations in float32 whatever the model's precision, so rows round differently.
    torch.testing.assert_close(read.double(), torch.cat(own), rtol=1e-5, atol=1e-5)
    weight_M = torch.linspace(-1, 1, len(read), dtype=torch.float64)
    expected = gradients(family.model, (torch.cat(own) * weight_M).sum())
    found = gradients(family.model, (read.double() * weight_M).sum())
    towers = [name for name in expected if "vis" in name and expected[name] is not None and expected[name].any()]
    assert len(towers) > 10
    for name, gradient in expected.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max() + 1))


def test_a_window_holds_in_padded_rows_with_images():
    """The mask of images replaces the family's own, in layers that see the last 5 tokens alone too."""
    family = awake(gemma3(window=5))
    documents = [
        plain(together([sequence(family, 3, "image 0", 9), *answers(family, 2)])),
        plain(together([sequence(family, 1, "image 1", 1, "image 2", 4), *answers(family, 3)])),
        plain(together([sequence(family, 8), *answers(family, 4)])),
    ]
    own = torch.cat([family.own_logprobs(one) for one in documents])
    read = PolicyModel(family.model)(packed(family, [[one] for one in documents])).logprobs_M
    torch.testing.assert_close(read.double(), own, rtol=1e-5, atol=1e-5)


def test_padded_rows_give_them_too(family, rows_of_documents):
    alone = [part for row in rows_of_documents for document in row for part in unshared(document)]
    own = torch.cat([family.own_logprobs(part) for part in alone])
    read = PolicyModel(family.model)(packed(family, [[part] for part in alone])).logprobs_M
    torch.testing.assert_close(read.double(), own, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_swapped_images_are_seen_and_do_not_reach_other_documents(family, rows_of_documents):
    policy, rows = PolicyModel(family.model), packed(family, rows_of_documents)
    before = policy(rows).logprobs_M
    keys = [image.key for image in rows.media.spans]
    assert len(keys) == 6  # the shared prompts' once
    pixels = family.pixels(keys)
    per_image = pixels.values.split(pixels.counts)
    changed = torch.cat([-per_image[0], *per_image[1:]])
    after = policy(with_pixels(rows, replace(pixels, values=changed))).logprobs_M
    of_first = rows.sequence_M < 3
    assert ((after - before)[of_first].abs() > 1e-4).all()
    assert torch.equal(after[~of_first], before[~of_first])


@torch.no_grad()
def test_an_image_of_a_shared_prompt_is_computed_once_for_its_responses(family):
    document = shared_prompt(sequence(family, 2, "image 0", 3), answers(family, 2, 5, 3))
    patches: list[int] = []
    hook = family.tower.register_forward_pre_hook(lambda module, inputs, named: patches.append(
        len(inputs[0] if inputs else named["pixel_values"])), with_kwargs=True)  # fmt: skip
    try:
        PolicyModel(family.model)(packed(family, [[document]]))
        PolicyModel(family.model)(packed(family, [unshared(document)]))
    finally:
        hook.remove()
    of_one = len(family.pixels([0]).values)
    assert patches == [of_one, 3 * of_one]


def test_positions_are_those_of_the_models_own_function():
    family = qwen2_vl()
    draw = torch.Generator().manual_seed(1)
    for count in [0, 1, 2, 3, 4] * 4:
        parts: list[Any] = [int(torch.randint(1, 5, (), generator=draw))]
        for _ in range(count):
            key = int(torch.randint(0, 4, (), generator=draw))
            parts += [f"image {key}", int(torch.randint(1, 5, (), generator=draw))]
        tokens = sequence(family, *parts)
        ids = tokens.input_ids.unsqueeze(0)
        grids_I3 = family.pixels([image.key for image in tokens.media]).grids_I3 if count else None
        expected, _ = family.model.model.get_rope_index(
            ids, mm_token_type_ids=(ids == IMAGE_ID).int(), image_grid_thw=grids_I3
        )
        assert torch.equal(position_axes(len(tokens), tokens.media), expected[:, 0])
        assert tokens.positions == int(expected.max()) + 1


def test_what_does_not_fit_images_is_refused(family, rows_of_documents):
    rows = packed(family, rows_of_documents)
    policy = PolicyModel(family.model)
    with pytest.raises(AssertionError, match="media that are not read would count as a text"):
        policy(with_pixels(rows, None))
    with pytest.raises(ThreestepError, match="noise on the embeddings would hide the positions of images"):
        policy(rows, noise_NTE=torch.zeros(*rows.input_ids_NT.shape, 32))
    from training.utils.models.attention import model_inputs

    for name in ("flex_attention", "flash_attention_2", "flash_attention_3"):
        expected = f"rows with images need --attn_implementation auto, sdpa or varlen, got {name}"
        with pytest.raises(ThreestepError, match=f"^{expected}$"):
            model_inputs(rows, name)
