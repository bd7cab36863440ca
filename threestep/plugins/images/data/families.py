"""The text of an image in each family of models, which takes the place of the chat template's, and the tokens in it
that stand for the image.

| family | the template writes | the model reads | positions |
| --- | --- | --- | --- |
| Qwen2-VL, Qwen2.5-VL, Qwen3-VL | `<|image_pad|>` between marks | one for each square of merged patches | by sides |
| LLaVA 1.5 | `<image>` | one for each patch | as text |
| LLaVA-NeXT, LLaVA-OneVision | `<image>` | `tiled` | as text |
| Gemma 3 | `<start_of_image>` | it, 256 soft tokens and an end, between empty lines | as text, seen both ways |
| Idefics 3, SmolVLM | `<image>` | for each tile its row and column and a fixed number | as text |
| InternVL | `<IMG_CONTEXT>` | a fixed number for each tile, between `<img>` and `</img>` | as text |

The numbers come from the model's configuration and from what the image processor makes of a picture; `reader` compares
the text with the family's own processor. Knows nothing of rows, files or Pillow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from threestep.plugins.images.data.tiled import TileSizes, joined_tokens
from threestep.plugins.images.pixels import ImagePixels
from training.utils.base.errors import ThreestepError
from training.utils.data.rows.tokenize import token_id


@dataclass(frozen=True)
class Run:
    """Tokens of an image, one after the other. sides: see `MediaSpan`."""

    tokens: int
    sides: tuple[int, int] | None = None


@dataclass(frozen=True)
class ImageText:
    """The text of one picture, for a model. runs: of the placeholder in `text`; several if the picture is cut up."""

    text: str
    runs: tuple[Run, ...]

    @property
    def tokens(self) -> int:
        return sum(run.tokens for run in self.runs)


@dataclass(frozen=True)
class ImageFamily:
    """The text of images in a family of models.

    written: what the chat template writes for an image.
    placeholder, placeholder_id: the token that stands for each token of an image.
    read: from what the image processor made of one picture to what the model reads.
    processor: the family's processor in transformers, and the attributes by which it writes images.
    asked: further arguments of the image processor.
    sees_itself: see `MediaSpan`.
    one_picture: rows of several pictures are read in another way than those of one.
    """

    written: str
    placeholder: str
    placeholder_id: int
    read: Callable[[Mapping[str, Any]], ImageText]
    processor: str
    attributes: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)
    sees_itself: bool = False
    one_picture: bool = False


def known_families() -> str:
    """The families of the table, for a sentence."""
    return ", ".join(sorted(_FAMILIES))


def knows(config: Any) -> bool:
    """True if the family of a model's configuration is in the table."""
    return config.model_type in _FAMILIES


def family_of(config: Any, tokenizer: Any) -> ImageFamily:
    """The family of a model's configuration, which `knows`. ThreestepError if the tokenizer lacks its tokens."""
    return _FAMILIES[config.model_type](config, _Tokens(config.model_type, tokenizer))


def pixels_of_picture(features: Mapping[str, Any]) -> ImagePixels:
    """An image processor's output for one picture, without the dimensions of lists of pictures."""
    values = torch.as_tensor(features["pixel_values"]).float()
    if values.dim() == 5:  # Idefics3: rows and their pictures' tiles; LLaVA-NeXT: pictures and their tiles
        values = values.flatten(0, 1)
    grid, size = (features.get(name) for name in ("image_grid_thw", "image_sizes"))
    grids_I3 = None if grid is None else torch.as_tensor(grid, dtype=torch.int64)
    cuts_I3 = None if size is None else torch.tensor([[len(values), *(int(side) for side in size[0])]])
    return ImagePixels(values, grids_I3, cuts_I3)


@dataclass(frozen=True)
class _Tokens:
    """A tokenizer's special tokens by id or text."""

    family: str
    tokenizer: Any

    def text(self, number: int) -> str:
        token = self.tokenizer.convert_ids_to_tokens(int(number)) if number < len(self.tokenizer) else None
        return self.known(token or f"number {number}")

    def known(self, token: str) -> str:
        """`token`, which is one token of the tokenizer; ThreestepError where it is not."""
        ids = self.tokenizer(token, add_special_tokens=False)["input_ids"]
        if ids != [token_id(self.tokenizer, token)]:
            whose = f" of '{self.tokenizer.name_or_path}'" if self.tokenizer.name_or_path else ""
            raise ThreestepError(
                f"the tokenizer{whose} has no token {token}, which models of the family {self.family} use for "
                "images; use the model's own tokenizer"
            )
        return token


def _qwen(config: Any, tokens: _Tokens) -> ImageFamily:
    token, merged = tokens.text(config.image_token_id), config.vision_config.spatial_merge_size

    def read(features: Mapping[str, Any]) -> ImageText:
        _, height, width = (int(number) for number in features["image_grid_thw"][0])
        sides = (height // merged, width // merged)
        run = Run(sides[0] * sides[1], sides)
        return ImageText(token * run.tokens, (run,))

    processor = {"qwen3_vl": "Qwen3VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor"}
    name = processor.get(config.model_type, "Qwen2VLProcessor")
    return ImageFamily(token, token, config.image_token_id, read, name, {"image_token": token})


def _llava(config: Any, tokens: _Tokens) -> ImageFamily:
    token, patch = tokens.text(config.image_token_id), config.vision_config.patch_size
    strategy = config.vision_feature_select_strategy
    heads = int(config.vision_config.model_type == "clip_vision_model")  # CLIP's own token before the patches'

    def read(features: Mapping[str, Any]) -> ImageText:
        height, width = features["pixel_values"][0].shape[-2:]
        run = Run((height // patch) * (width // patch) + heads - (strategy == "default"))
        return ImageText(token * run.tokens, (run,))

    attributes = {
        "image_token": token,
        "patch_size": patch,
        "num_additional_image_tokens": heads,
        "vision_feature_select_strategy": strategy,
    }
    return ImageFamily(token, token, config.image_token_id, read, "LlavaProcessor", attributes)


def _llava_tiled(config: Any, tokens: _Tokens) -> ImageFamily:
    token, is_next = tokens.text(config.image_token_id), config.model_type == "llava_next"
    tower, strategy = config.vision_config, config.vision_feature_select_strategy
    side = tower.image_size // tower.patch_size
    heads = int(tower.model_type == "clip_vision_model")  # CLIP's own token before the patches'
    # LLaVA-OneVision makes the grid of tiles smaller where it holds more patches than so many tiles.
    most_tiles = None if is_next else int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
    sizes = TileSizes(config.image_grid_pinpoints, tower.image_size, side, most_tiles)

    def read(features: Mapping[str, Any]) -> ImageText:
        height, width = (int(side) for side in features["image_sizes"][0])
        run = Run(joined_tokens(sizes, height, width) + heads - (strategy == "default"))
        return ImageText(token * run.tokens, (run,))

    attributes = {"image_token": token, "vision_feature_select_strategy": strategy}
    if is_next:
        attributes |= {"patch_size": tower.patch_size, "num_additional_image_tokens": heads}
        return ImageFamily(token, token, config.image_token_id, read, "LlavaNextProcessor", attributes)
    attributes |= {"num_image_tokens": side * side, "vision_aspect_ratio": config.vision_aspect_ratio}
    name = "LlavaOnevisionProcessor"
    return ImageFamily(token, token, config.image_token_id, read, name, attributes, one_picture=True)


def _gemma3(config: Any, tokens: _Tokens) -> ImageFamily:
    ids = (config.image_token_id, config.boi_token_id, config.eoi_token_id)
    token, begin, end = map(tokens.text, ids)
    run = Run(config.mm_tokens_per_image)
    text = f"\n\n{begin}{token * run.tokens}{end}\n\n"

    def read(features: Mapping[str, Any]) -> ImageText:
        if int(features["num_crops"][0]):
            raise ThreestepError(
                "the image processor splits images (do_pan_and_scan), but Gemma 3 is trained on whole images; disable "
                "this in preprocessor_config.json"
            )
        return ImageText(text, (run,))

    attributes = {"full_image_sequence": text}
    asked = {"do_pan_and_scan": False}
    return ImageFamily(
        begin, token, config.image_token_id, read, "Gemma3Processor", attributes, asked, sees_itself=True
    )


def _idefics3(config: Any, tokens: _Tokens) -> ImageFamily:
    token = tokens.text(config.image_token_id)
    around, whole = tokens.known("<fake_token_around_image>"), "<global-img>"
    side = config.vision_config.image_size // config.vision_config.patch_size // config.scale_factor
    run = Run(side * side)
    image = token * run.tokens
    last = f"{around}{whole}{image}{around}"

    def read(features: Mapping[str, Any]) -> ImageText:
        rows, columns = int(features["rows"][0][0]), int(features["cols"][0][0])
        if not rows and not columns:
            return ImageText(last, (run,))
        lines = (
            "".join(f"{around}<row_{row + 1}_col_{column + 1}>{image}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        return ImageText("".join(lines) + "\n" + last, (run,) * (rows * columns + 1))

    attributes = {
        "image_token": token,
        "fake_image_token": around,
        "global_image_tag": whole,
        "global_image_token": whole,
        "image_seq_len": run.tokens,
    }
    name = "SmolVLMProcessor" if config.model_type == "smolvlm" else "Idefics3Processor"
    return ImageFamily(token, token, config.image_token_id, read, name, attributes, {"return_row_col_info": True})


def _internvl(config: Any, tokens: _Tokens) -> ImageFamily:
    token, begin, end = tokens.text(config.image_token_id), tokens.known("<img>"), tokens.known("</img>")
    run = Run(config.image_seq_length)

    def read(features: Mapping[str, Any]) -> ImageText:
        tiles = len(features["pixel_values"])
        return ImageText(f"{begin}{token * (run.tokens * tiles)}{end}", (run,) * tiles)

    attributes = {
        "image_token": token,
        "start_image_token": begin,
        "end_image_token": end,
        "image_seq_length": run.tokens,
    }
    asked = {"crop_to_patches": True}  # the processor's default; the image processor's own is False
    return ImageFamily(token, token, config.image_token_id, read, "InternVLProcessor", attributes, asked)


_FAMILIES: dict[str, Callable[[Any, _Tokens], ImageFamily]] = {
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "llava": _llava,
    "llava_next": _llava_tiled,
    "llava_onevision": _llava_tiled,
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "smolvlm": _idefics3,
}
