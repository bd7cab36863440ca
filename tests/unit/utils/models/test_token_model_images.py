"""Models of images and text: packed rows with shared image prompts give what the model's own forward of each sequence
by itself gives, and its gradients; positions are the model's own; a shared image is computed once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from training.utils.layout.documents import Document, TokenSequence, plain, shared_prompt, unshared
from training.utils.layout.images import ImagePixels, ImageSpan, position_axes
from training.utils.layout.rows import packed_rows
from training.utils.models.token_model import PolicyModel
from training.utils.run.errors import ThreestepError

IMAGE_ID = 90
TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@dataclass
class Family:
    """A tiny model in float64, the sides of its images in tokens, and how pixels are made for them."""

    model: Any
    sides: tuple[tuple[int, int], ...]
    counts_sides: bool
    sees_itself: bool = False

    def pixels(self, keys) -> ImagePixels:
        """Of the images with these keys; an image is its key's random numbers."""
        values, grids = [], []
        for key in keys:
            draw = torch.Generator().manual_seed(key)
            if self.counts_sides:
                height, width = self.sides[key]
                grids.append([1, 2 * height, 2 * width])
                values.append(torch.randn(4 * height * width, 3 * 2 * 14 * 14, generator=draw, dtype=torch.float64))
            else:
                values.append(torch.randn(1, 3, 28, 28, generator=draw, dtype=torch.float64))
        return ImagePixels(torch.cat(values), torch.tensor(grids) if grids else None)

    def span(self, begin, key) -> ImageSpan:
        height, width = self.sides[key]
        return ImageSpan(begin, height * width, (height, width) if self.counts_sides else None, key, self.sees_itself)

    def own_logprobs(self, document: Document) -> torch.Tensor:
        """Of the targets of one sequence, by the model's own forward with its own positions."""
        (segment,) = document.segments
        tokens = segment.tokens
        inputs = {"input_ids": tokens.input_ids.unsqueeze(0)}
        if tokens.images:
            pixels = self.pixels([image.key for image in tokens.images])
            is_image = inputs["input_ids"] == IMAGE_ID
            inputs["pixel_values"] = pixels.values
            if self.sees_itself:
                inputs["token_type_ids"] = is_image.int()
            if self.counts_sides:
                inputs.update(image_grid_thw=pixels.grids_I3, mm_token_type_ids=is_image.int())
        logprobs_TV = self.model(**inputs, use_cache=False).logits[0].log_softmax(-1)
        targets = tokens.is_target.nonzero().flatten()
        return logprobs_TV[targets - 1, tokens.input_ids[targets]]


QWEN_IDS = {"image_token_id": IMAGE_ID, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
UNEVEN = ((2, 3), (1, 1), (3, 1), (2, 2))


def qwen2_vl() -> Family:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "patch_size": 14, "mlp_ratio": 2}
    torch.manual_seed(0)
    config = Qwen2VLConfig(text_config={**TEXT, "rope_parameters": QWEN_ROPE}, vision_config=vision, **QWEN_IDS)
    return Family(Qwen2VLForConditionalGeneration(config).double().eval(), UNEVEN, True)


def qwen2_5_vl() -> Family:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
              "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}  # fmt: skip
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(text_config={**TEXT, "rope_parameters": QWEN_ROPE}, vision_config=vision, **QWEN_IDS)
    return Family(Qwen2_5_VLForConditionalGeneration(config).double().eval(), UNEVEN, True)


def qwen3_vl() -> Family:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {**QWEN_ROPE, "mrope_interleaved": True}
    vision = {"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
              "patch_size": 14, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}  # fmt: skip
    torch.manual_seed(0)
    text = {**TEXT, "head_dim": 8, "rope_parameters": rope}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **QWEN_IDS)
    return Family(Qwen3VLForConditionalGeneration(config).double().eval(), UNEVEN, True)


def llava() -> Family:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=vision, text_config=LlamaConfig(**TEXT), image_token_id=IMAGE_ID, image_seq_length=4
    )
    return Family(LlavaForConditionalGeneration(config).double().eval(), ((2, 2),) * 4, False)


def gemma3() -> Family:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

    layers = {"head_dim": 8, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"image_token_index": IMAGE_ID, "boi_token_index": 91, "eoi_token_index": 92}
    torch.manual_seed(0)
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**{**TEXT, **layers}),
        vision_config=SiglipVisionConfig(**tower, image_size=28, patch_size=14, vision_use_head=False),
        mm_tokens_per_image=4,
        **ids,
    )
    return Family(Gemma3ForConditionalGeneration(config).double().eval(), ((2, 2),) * 4, False, sees_itself=True)


@pytest.fixture(scope="module", params=[qwen2_vl, qwen2_5_vl, qwen3_vl, llava, gemma3], ids=lambda make: make.__name__)
def family(request):
    made = request.param()
    for weight in made.model.parameters():  # a fresh tower is nearly deaf
        torch.nn.init.normal_(weight, std=0.2 if weight.dim() > 1 else 0.5)
    return made


def sequence(family: Family, *parts: Any, is_target: bool = False, seed: int = 0) -> TokenSequence:
    """parts: a number of tokens of text, or "image K" for the one with that key."""
    draw = torch.Generator().manual_seed(seed)
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, str):
            images.append(family.span(len(ids), int(part.split()[1])))
            ids += [IMAGE_ID] * images[-1].tokens
        else:
            ids += torch.randint(2, 90, (part,), generator=draw).tolist()
    return TokenSequence(torch.tensor(ids), torch.full((len(ids),), is_target), tuple(images))


def answers(family: Family, *lengths: int) -> list[TokenSequence]:
    return [sequence(family, length, is_target=True, seed=length) for length in lengths]


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
    return replace(rows, pixels=family.pixels([image.key for image in rows.images]))


def gradients(model, loss):
    weights = dict(model.named_parameters())
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values()), allow_unused=True), strict=True))


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


def test_padded_rows_give_them_too(family, rows_of_documents):
    alone = [part for row in rows_of_documents for document in row for part in unshared(document)]
    own = torch.cat([family.own_logprobs(part) for part in alone])
    read = PolicyModel(family.model)(packed(family, [[part] for part in alone])).logprobs_M
    torch.testing.assert_close(read.double(), own, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_swapped_images_are_seen_and_do_not_reach_other_documents(family, rows_of_documents):
    policy, rows = PolicyModel(family.model), packed(family, rows_of_documents)
    before = policy(rows).logprobs_M
    keys = [image.key for image in rows.images]
    assert len(keys) == 6  # the shared prompts' once
    pixels = family.pixels(keys)
    per_image = pixels.values.split([4 * image.tokens if family.counts_sides else 1 for image in rows.images])
    changed = torch.cat([-per_image[0], *per_image[1:]])
    after = policy(replace(rows, pixels=replace(pixels, values=changed))).logprobs_M
    of_first = rows.sequence_M < 3
    assert ((after - before)[of_first].abs() > 1e-4).all()
    assert torch.equal(after[~of_first], before[~of_first])


@torch.no_grad()
def test_an_image_of_a_shared_prompt_is_computed_once_for_its_responses(family):
    document = shared_prompt(sequence(family, 2, "image 0", 3), answers(family, 2, 5, 3))
    patches: list[int] = []
    tower = family.model.model.visual if family.counts_sides else family.model.model.vision_tower
    hook = tower.register_forward_pre_hook(lambda module, inputs, named: patches.append(
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
        grids_I3 = family.pixels([image.key for image in tokens.images]).grids_I3 if count else None
        expected, _ = family.model.model.get_rope_index(
            ids, mm_token_type_ids=(ids == IMAGE_ID).int(), image_grid_thw=grids_I3
        )
        assert torch.equal(position_axes(len(tokens), tokens.images), expected[:, 0])
        assert tokens.positions == int(expected.max()) + 1


def test_what_does_not_fit_images_is_refused(family, rows_of_documents):
    rows = packed(family, rows_of_documents)
    policy = PolicyModel(family.model)
    with pytest.raises(AssertionError, match="an image without pixels would be read as a text"):
        policy(replace(rows, pixels=None))
    with pytest.raises(ThreestepError, match="noise on the embeddings would hide the places of images"):
        policy(rows, noise_NTE=torch.zeros(*rows.input_ids_NT.shape, 32))
    from training.utils.models.attention import model_inputs

    with pytest.raises(ThreestepError, match="rows with images expect --attn_implementation sdpa, got varlen"):
        model_inputs(rows, "varlen")
