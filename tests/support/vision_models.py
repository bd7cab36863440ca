"""Tiny models of images and text in float64, random pixels as their processors would make, and rows with images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from threestep.plugins.images.pixels import ImagePixels
from training.utils.contracts.documents import Document, MediaSpan, TokenSequence
from training.utils.contracts.token_rows import TokenRows

IMAGE_ID = 90
TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip


@dataclass
class Family:
    """A tiny model in float64, the sides of its images in tokens, and how pixels are made for them."""

    model: Any
    sides: tuple[tuple[int, int], ...]
    counts_sides: bool = False
    sees_itself: bool = False
    by_row: bool = False  # its forward takes the images of each row
    # Of families that cut pictures up: tiles, height and width of each, whose tokens are the product of its sides.
    cuts: tuple[tuple[int, int, int], ...] = ()

    @property
    def tower(self) -> Any:
        names = ("visual", "vision_tower", "vision_model")
        return next(getattr(self.model.model, name) for name in names if hasattr(self.model.model, name))

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
                tiles = self.cuts[key][0] if self.cuts else 1
                values.append(torch.randn(tiles, 3, 28, 28, generator=draw, dtype=torch.float64))
        cuts = torch.tensor([self.cuts[key] for key in keys]) if self.cuts else None
        return ImagePixels(torch.cat(values), torch.tensor(grids) if grids else None, cuts)

    def span(self, begin, key) -> MediaSpan:
        height, width = self.sides[key]
        return MediaSpan(begin, height * width, (height, width) if self.counts_sides else None, key, self.sees_itself)

    def own_inputs(self, tokens: TokenSequence) -> dict[str, Any]:
        """What the model's own forward takes for one sequence; positions are its own."""
        inputs: dict[str, Any] = {"input_ids": tokens.input_ids.unsqueeze(0), "use_cache": False}
        if tokens.media:
            pixels = self.pixels([image.key for image in tokens.media])
            is_image = inputs["input_ids"] == IMAGE_ID
            inputs["pixel_values"] = pixels.values.unsqueeze(0) if self.by_row else pixels.values
            if self.sees_itself:
                inputs["token_type_ids"] = is_image.int()
            if self.counts_sides:
                inputs.update(image_grid_thw=pixels.grids_I3, mm_token_type_ids=is_image.int())
            if self.cuts:  # as their processors hand them over: pictures of fewer tiles are filled with zeros
                parts = pixels.values.split(pixels.counts)
                inputs["pixel_values"] = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
                inputs["image_sizes"] = pixels.cuts_I3[:, 1:]
        return inputs

    def own_logprobs(self, document: Document) -> torch.Tensor:
        """Of the targets of one sequence, by the model's own forward."""
        (segment,) = document.segments
        tokens = segment.tokens
        logprobs_TV = self.model(**self.own_inputs(tokens)).logits[0].log_softmax(-1)
        targets = tokens.is_target.nonzero().flatten()
        return logprobs_TV[targets - 1, tokens.input_ids[targets]]


def head_dim() -> int:
    return int(TEXT["hidden_size"] // TEXT["num_attention_heads"])


def _family(model_class: Any, config: Any, sides: Sequence[tuple[int, int]], **more: Any) -> Family:
    torch.manual_seed(0)
    return Family(model_class(config).double().eval(), tuple(sides), **more)


# Of Qwen's: each picture has sides of its own.
QWEN_IDS = {"image_token_id": IMAGE_ID, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
QWEN_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
UNEVEN = ((2, 3), (1, 1), (3, 1), (2, 2))
_QWEN_VISION = {"depth": 2, "num_heads": 2, "patch_size": 14}
# Of the others: two by two tokens a picture or a tile.
EVEN = ((2, 2),) * 4
_TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_PATCHES = {**_TOWER, "image_size": 28, "patch_size": 14}


def _later_vision(**more: Any) -> dict[str, Any]:
    """Qwen2.5-VL's and Qwen3-VL's. The text's width is read here: tests change it."""
    return {**_QWEN_VISION, "hidden_size": 32, "out_hidden_size": TEXT["hidden_size"], "intermediate_size": 48, **more}


def qwen2_vl() -> Family:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    vision = {**_QWEN_VISION, "embed_dim": 32, "hidden_size": TEXT["hidden_size"], "mlp_ratio": 2}
    config = Qwen2VLConfig(text_config={**TEXT, "rope_parameters": dict(QWEN_ROPE)}, vision_config=vision, **QWEN_IDS)
    return _family(Qwen2VLForConditionalGeneration, config, UNEVEN, counts_sides=True)


def qwen2_5_vl() -> Family:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {**TEXT, "rope_parameters": dict(QWEN_ROPE)}
    vision = _later_vision(window_size=56, fullatt_block_indexes=[1])
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **QWEN_IDS)
    return _family(Qwen2_5_VLForConditionalGeneration, config, UNEVEN, counts_sides=True)


def qwen3_vl() -> Family:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = {**TEXT, "head_dim": head_dim(), "rope_parameters": {**QWEN_ROPE, "mrope_interleaved": True}}
    vision = _later_vision(num_position_embeddings=16, deepstack_visual_indexes=[0])
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **QWEN_IDS)
    return _family(Qwen3VLForConditionalGeneration, config, UNEVEN, counts_sides=True)


def llava() -> Family:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    parts = {"vision_config": CLIPVisionConfig(**_PATCHES), "text_config": LlamaConfig(**TEXT)}
    config = LlavaConfig(**parts, image_token_id=IMAGE_ID, image_seq_length=4)
    return _family(LlavaForConditionalGeneration, config, EVEN)


# Of 2 x 2 tokens a tile. A line of a picture ends with a newline, and the whole picture stands before its lines: the
# first and the last have borders that are left out.
GRIDS = [[28, 56], [56, 28], [56, 56]]
CUTS = ((5, 40, 56), (3, 20, 50), (3, 50, 20), (5, 56, 40))


def llava_next() -> Family:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaNextConfig, LlavaNextForConditionalGeneration

    parts = {"vision_config": CLIPVisionConfig(**_PATCHES), "text_config": LlamaConfig(**TEXT)}
    config = LlavaNextConfig(**parts, image_token_id=IMAGE_ID, image_grid_pinpoints=GRIDS)
    sides = ((1, 4 + 2 * 5), (1, 4 + 2 * 5), (1, 4 + 4 * 3), (1, 4 + 4 * 3))
    return _family(LlavaNextForConditionalGeneration, config, sides, cuts=CUTS)


def llava_onevision() -> Family:
    """Grids of more than four patches are made smaller."""
    from transformers import (
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        Qwen2Config,
        SiglipVisionConfig,
    )

    tower = SiglipVisionConfig(**_PATCHES, vision_use_head=False)
    ids = {"image_token_id": IMAGE_ID, "video_token_id": 91}
    grids = {"image_grid_pinpoints": GRIDS, "vision_aspect_ratio": "anyres_max_1"}
    config = LlavaOnevisionConfig(vision_config=tower, text_config=Qwen2Config(**TEXT), **ids, **grids)
    sides = ((1, 4 + 1 * 3), (1, 4 + 1 * 3), (1, 4 + 2 * 2), (1, 4 + 2 * 2))
    return _family(LlavaOnevisionForConditionalGeneration, config, sides, cuts=CUTS)


def gemma3(window: int = 64) -> Family:
    """window: of every second layer."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

    layers = {"head_dim": head_dim(), "sliding_window": window, "layer_types": ["sliding_attention", "full_attention"]}
    tower = SiglipVisionConfig(**_PATCHES, vision_use_head=False)
    ids = {"image_token_index": IMAGE_ID, "boi_token_index": 91, "eoi_token_index": 92}
    text = Gemma3TextConfig(**{**TEXT, **layers})
    config = Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4, **ids)
    return _family(Gemma3ForConditionalGeneration, config, EVEN, sees_itself=True)


def idefics3() -> Family:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    return _of_tiles(Idefics3Config, Idefics3ForConditionalGeneration)


def smolvlm() -> Family:
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    return _of_tiles(SmolVLMConfig, SmolVLMForConditionalGeneration)


def _of_tiles(config_class: Any, model_class: Any) -> Family:
    from transformers import LlamaConfig

    parts = {"text_config": LlamaConfig(**TEXT), "vision_config": {**_PATCHES, "patch_size": 7}}
    config = config_class(**parts, scale_factor=2, image_token_id=IMAGE_ID, pad_token_id=0)
    return _family(model_class, config, EVEN, by_row=True)


def internvl() -> Family:
    from transformers import InternVLConfig, InternVLForConditionalGeneration, InternVLVisionConfig, Qwen2Config

    tower = InternVLVisionConfig(**_TOWER, image_size=[28, 28], patch_size=[7, 7])
    rest = {"downsample_ratio": 0.5, "image_token_id": IMAGE_ID, "image_seq_length": 4}
    config = InternVLConfig(vision_config=tower, text_config=Qwen2Config(**TEXT), **rest)
    return _family(InternVLForConditionalGeneration, config, EVEN)


_MAKERS = (
    qwen2_vl, qwen2_5_vl, qwen3_vl, llava, llava_next, llava_onevision, gemma3, idefics3, smolvlm, internvl,
)  # fmt: skip
FAMILIES: dict[str, Callable[[], Family]] = {make.__name__: make for make in _MAKERS}


class PlainScorer(torch.nn.Module):
    """A head on the body of a family, by whose own forward it reads one sequence. Its weights have the names of
    transformers' scalar models."""

    def __init__(self, family: Family) -> None:
        super().__init__()
        self.model = family.model.model
        self.score = torch.nn.Linear(TEXT["hidden_size"], 1, bias=False, dtype=torch.float64)
        torch.nn.init.normal_(self.score.weight, generator=torch.Generator().manual_seed(2))

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.score(self.model(**inputs)[0][0, -1]).squeeze(-1)


def awake(family: Family) -> Family:
    """The family with larger weights: a fresh tower is nearly deaf."""
    torch.manual_seed(1)
    for weight in family.model.parameters():
        torch.nn.init.normal_(weight, std=0.2 if weight.dim() > 1 else 0.5)
    return family


def sequence(family: Family, *parts: int | str, is_target: bool = False, seed: int = 0) -> TokenSequence:
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


def with_pixels(rows: TokenRows, pixels: ImagePixels | None) -> TokenRows:
    """Return rows that have images with these pixels of them."""
    assert rows.media is not None
    return replace(rows, media=replace(rows.media, read=pixels))
