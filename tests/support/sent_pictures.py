"""Tiny models of images and text in float64 with tokenizer and image processor, and log-probabilities of tokens and
pictures by plain transformers: the reference of what clients of the training server get."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.support.vision_models import FAMILIES, IMAGE_ID, awake
from threestep.plugins.images.data.families import family_of
from threestep.plugins.images.data.reader import ImageReader
from threestep.plugins.images.run.sent_images import SentImages
from threestep.plugins.programs.new_model import image_processor

WORDS = 90  # ids of text
_LETTERS = "abcdefghijklmnopqrstuvwxyz "


def photo(seed: int, width: int, height: int, form: str = "PNG") -> bytes:
    """An encoded picture of random colours."""
    from PIL import Image

    colours = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).save(file, format=form)
    return file.getvalue()


@dataclass(frozen=True)
class Seeing:
    """A model, and how it reads pictures. An input is a list of token ids and encoded pictures."""

    model: Any
    processor: Any
    media: SentImages

    def tokens(self, picture: bytes) -> int:
        """How many tokens stand for a picture, by the image processor alone."""
        return self._features(picture)[1]

    def _features(self, picture: bytes) -> tuple[dict[str, torch.Tensor], int]:
        from PIL import Image

        found = self.processor(images=[Image.open(io.BytesIO(picture))], return_tensors="pt")
        given = {"pixel_values": found["pixel_values"].double()}
        if "image_grid_thw" not in found:
            return given, 4  # 28 x 28 pixels in patches of 14 x 14
        return {**given, "image_grid_thw": found["image_grid_thw"]}, int(found["image_grid_thw"].prod()) // 4

    def ids(self, parts: list[Any]) -> list[int]:
        """The tokens that the model reads."""
        each = ([part] if isinstance(part, int) else [IMAGE_ID] * self.tokens(part) for part in parts)
        return [token for own in each for token in own]

    def logprobs(self, parts: list[Any], model: Any = None) -> torch.Tensor:
        """Of what may follow each token [T, V], by one call of transformers' own forward."""
        ids_1T = torch.tensor([self.ids(parts)])
        pictures = [self._features(part)[0] for part in parts if isinstance(part, bytes)]
        given = {name: torch.cat([own[name] for own in pictures]) for name in (pictures[0] if pictures else ())}
        if self.processor.__class__.__name__.startswith("Qwen"):
            given["mm_token_type_ids"] = (ids_1T == IMAGE_ID).long()
        return (model or self.model)(input_ids=ids_1T, use_cache=False, **given).logits[0].log_softmax(-1)

    def greedy(self, parts: list[Any], count: int, model: Any = None) -> list[int]:
        """The likeliest tokens behind an input, each by a forward of all before it; never the one of pictures."""
        found: list[int] = []
        for _ in range(count):
            last_V = self.logprobs([*parts, *found], model)[-1].clone()
            last_V[IMAGE_ID] = -torch.inf
            found.append(int(last_V.argmax()))
        return found


def seeing(family: str) -> Seeing:
    """A model of a family of `vision_models`, the same each time."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    model = awake(FAMILIES[family]()).model.requires_grad_(False)
    model.config.text_config.max_position_embeddings = 128
    processor: Any = image_processor(16)
    if family == "llava":
        sides = {"height": 28, "width": 28}
        processor = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=sides)
    tokenizer = _tokenizer("<image>" if family == "llava" else "<|image_pad|>")
    reader = ImageReader(family_of(model.config, tokenizer), processor, family)
    return Seeing(model, processor, SentImages(reader, tokenizer))


def _tokenizer(image: str) -> Any:
    """Letters, words that no text has, and the token of pictures, in a vocabulary as small as the models'."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<end>", *_LETTERS]
    words += [f"word{number}" for number in range(len(words), IMAGE_ID)]
    vocabulary = {word: number for number, word in enumerate([*words, image])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="word50"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", unk_token="word50")
    fast.add_special_tokens({"additional_special_tokens": [image]})
    return fast
