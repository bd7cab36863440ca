"""Readers of images for tiny models of several families, each with a tokenizer and a chat template like its own, and
small pictures. Nothing is downloaded, and no weights are made."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from threestep.plugins.images.data.families import family_of
from threestep.plugins.images.data.reader import ImageReader
from threestep.plugins.programs.new_model import VISION_TEMPLATE, image_processor

_ROLES = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
_END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# All pictures of a message, then its texts; a content that is a text is lost, as by LLaVA's own.
_LLAVA = (
    _ROLES + "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %}" + _END
)


def _parts(image: str) -> str:
    return (
        _ROLES + "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
        "{% if c['type'] == 'image' %}" + image + "{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}" + _END
    )


_IDEFICS = ["<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>"]
_TOKENS = {
    "qwen2_vl": ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"],
    "llava": ["<image>"],
    "llava_next": ["<image>"],
    "llava_onevision": ["<image>"],
    "gemma3": ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "internvl": ["<IMG_CONTEXT>", "<img>", "</img>"],
}
_TEMPLATES = {
    "qwen2_vl": VISION_TEMPLATE,
    "llava": _LLAVA,
    "llava_next": _LLAVA,
    "llava_onevision": _LLAVA,
    "gemma3": _parts("<start_of_image>"),
    "idefics3": _parts("<image>"),
    "smolvlm": _parts("<image>"),
    "internvl": _parts("<IMG_CONTEXT>\\n"),
}
FAMILIES = tuple(_TOKENS)


def tokenizer_of(family: str) -> Any:
    """A tokenizer of bytes with the family's tokens and template; eos is <|im_end|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.add_tokens(["<|im_start|>", *_TOKENS[family]], special_tokens=True)
    fast.chat_template = _TEMPLATES[family]
    return fast


def reader_of(family: str, tokenizer: Any, **settings: Any) -> ImageReader:
    """settings: of the image processor, in place of small ones."""
    first = tokenizer.convert_tokens_to_ids(_TOKENS[family])
    config, processor = _by_tiles(family, first) or _whole(family, first)
    for name, value in settings.items():
        setattr(processor, name, value)
    config.model_type = family
    return ImageReader(family_of(config, tokenizer), processor, family)


def _by_tiles(family: str, first: list[int]) -> tuple[Any, Any] | None:
    """The configuration and image processor of a family that cuts pictures up. first: ids of its tokens."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    edges = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    grids = [[16, 32], [32, 16], [32, 32], [16, 48]]
    if family in ("idefics3", "smolvlm"):
        vision = SimpleNamespace(image_size=16, patch_size=4)
        config = SimpleNamespace(image_token_id=first[0], vision_config=vision, scale_factor=2)
        return config, (Idefics3ImageProcessorPil if family == "idefics3" else SmolVLMImageProcessorPil)(**edges)
    if family not in ("llava_next", "llava_onevision"):
        return None
    is_next = family == "llava_next"
    tower = "clip_vision_model" if is_next else "siglip_vision_model"
    config = SimpleNamespace(
        image_token_id=first[0],
        vision_config=SimpleNamespace(image_size=16, patch_size=4, model_type=tower),
        vision_feature_select_strategy="default" if is_next else "full",
        vision_aspect_ratio="anyres_max_2",
        image_grid_pinpoints=grids,
    )
    sides = {"height": 16, "width": 16}
    if is_next:
        return config, LlavaNextImageProcessorPil(
            size={"shortest_edge": 16}, crop_size=sides, image_grid_pinpoints=grids
        )
    return config, LlavaOnevisionImageProcessorPil(size=sides, image_grid_pinpoints=grids)


def _whole(family: str, first: list[int]) -> tuple[Any, Any]:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    if family == "qwen2_vl":
        config = SimpleNamespace(image_token_id=first[1], vision_config=SimpleNamespace(spatial_merge_size=2))
        processor: Any = image_processor(16)
    elif family == "llava":
        vision = SimpleNamespace(patch_size=14, model_type="clip_vision_model")
        config = SimpleNamespace(
            image_token_id=first[0], vision_config=vision, vision_feature_select_strategy="default"
        )
        sides = {"height": 28, "width": 28}
        processor = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=sides)
    elif family == "gemma3":
        config = SimpleNamespace(image_token_id=first[0], boi_token_id=first[1], eoi_token_id=first[2])
        config.mm_tokens_per_image = 4
        processor = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    else:
        config = SimpleNamespace(image_token_id=first[0], image_seq_length=4)
        processor = GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, max_patches=4)
    return config, processor


def write_folder(folder: Path) -> Path:
    """A Qwen2-VL's folder without weights: its configuration, tokenizer, chat template and image processor."""
    from transformers import Qwen2VLConfig

    tokenizer = tokenizer_of("qwen2_vl")
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    text = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    Qwen2VLConfig(text_config=text, image_token_id=image).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    image_processor(16).save_pretrained(folder)
    return folder


def picture(width: int = 56, height: int = 28, color: tuple[int, int, int] = (200, 30, 30), form: str = "PNG") -> bytes:
    """An encoded picture of one colour."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, format=form)
    return file.getvalue()
