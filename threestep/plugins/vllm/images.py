"""Prompts with images for vLLM: the tokens that the model is trained on, and the pixels that its tower is trained on.

vLLM would make both itself, by transformers' processor of the family: its pixels are torchvision's, which differ from
Pillow's, and it would expand placeholders anew. Here it is handed what step 3 has already made: all tokens of a prompt,
the place of each image among them, and its pixels under a hash, by which vLLM keeps features and cached blocks of one
picture apart from those of another. A picture that is cut up is an image for each of its parts.

vLLM's classes of such models are registered with a processor that makes nothing. So no processor of transformers is
started, and torchvision, which the modules of some import for it, may be missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers.utils import logging

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MODALITY = "image"
_TOWER_LAYER = re.compile(r"encoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class PlacedImage:
    """An image of a prompt, or a part of one.

    begin, tokens: where its tokens stand. values, grid_3, cut_3: its pixels, see `ImagePixels`. digest: of these.
    """

    begin: int
    tokens: int
    values: torch.Tensor
    grid_3: torch.Tensor | None
    cut_3: torch.Tensor | None
    digest: str


def placed_images(images: Any, dtype: torch.dtype) -> list[tuple[PlacedImage, ...]]:
    """Return those of each prompt, with pixels in `dtype`."""
    spans = [span for own in images.spans for span in own]
    if not spans:
        return [() for _ in images.spans]
    pixels = images.pixels_of([span.key for span in spans])
    values = pixels.values.split(pixels.counts)
    grids, cuts = (_of_each(rows, len(spans)) for rows in (pixels.grids_I3, pixels.cuts_I3))
    placed = iter(
        PlacedImage(span.begin, span.tokens, own.to(dtype), grid_3, cut_3, _digest(own, grid_3, cut_3))
        for span, own, grid_3, cut_3 in zip(spans, values, grids, cuts, strict=True)
    )
    return [tuple(next(placed) for _ in own) for own in images.spans]


def engine_prompt(model_type: str, ids: Sequence[int], images: Sequence[PlacedImage]) -> dict[str, Any]:
    """Return what vLLM's engine takes for a prompt. model_type: of the model's configuration."""
    if not images:
        return {"prompt_token_ids": list(ids)}
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    items = [_item(_FIELDS[model_type](image, ids[image.begin])) for image in images]
    return {
        "type": "multimodal",
        "prompt_token_ids": list(ids),
        "mm_kwargs": MultiModalKwargsItems({_MODALITY: items}),
        "mm_hashes": {_MODALITY: [image.digest for image in images]},
        "mm_placeholders": {_MODALITY: [PlaceholderRange(image.begin, image.tokens) for image in images]},
    }


def _item(fields: Mapping[str, tuple[torch.Tensor, bool]]) -> Any:
    """vLLM's form of an image. fields: see `_FIELDS`."""
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalFlatField,
        MultiModalKwargsItem,
    )

    def element(name: str, data: torch.Tensor, joined: bool) -> Any:
        on_host = data.dtype == torch.int64  # counts and grids
        if joined:
            field: Any = MultiModalFlatField(slices=[slice(0, len(data))], keep_on_cpu=on_host)
        else:
            field = MultiModalBatchedField(keep_on_cpu=on_host)
        return MultiModalFieldElem(data=data, field=field)

    return MultiModalKwargsItem({name: element(name, *given) for name, given in fields.items()})


def _of_each(rows_I3: torch.Tensor | None, count: int) -> list[torch.Tensor | None]:
    return [None] * count if rows_I3 is None else [*rows_I3]


def _digest(values: torch.Tensor, *sizes: torch.Tensor | None) -> str:
    shapes = [tuple(values.shape), *(None if size is None else size.tolist() for size in sizes)]
    found = hashlib.sha256(repr(shapes).encode())
    found.update(values.contiguous().numpy().tobytes())
    return found.hexdigest()


def start_settings(model: PreTrainedModel, longest_tokens: int) -> dict[str, Any]:
    """Have vLLM read models of the class of `model` without a processor; return what it is started with. {} for a model
    of text, and for families whose images have no form here."""
    if model.config.model_type not in _FIELDS:
        return {}
    from vllm.model_executor.models import ModelRegistry
    from vllm.multimodal import MULTIMODAL_REGISTRY
    from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

    class NoInfo(BaseProcessingInfo):
        def get_supported_mm_limits(self) -> Mapping[str, int | None]:
            return {_MODALITY: None}

        def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
            return {_MODALITY: longest_tokens}

    class NoDummies(BaseDummyInputsBuilder[NoInfo]):
        get_dummy_text = get_dummy_mm_data = _nothing_made

    class NoProcessor(BaseMultiModalProcessor[NoInfo]):
        requires_tokenizer = False
        _get_mm_fields_config = _get_prompt_updates = _nothing_made

    name = type(model).__name__
    with _torchvision_named():
        kind: Any = type(name, (ModelRegistry.models[name].load_model_cls(),), {})
    MULTIMODAL_REGISTRY.register_processor(NoProcessor, info=NoInfo, dummy_inputs=NoDummies)(kind)
    ModelRegistry.register_model(name, kind)  # as a class: by its address another process would import it
    return {
        "limit_mm_per_prompt": {_MODALITY: longest_tokens},
        "skip_mm_profiling": True,
        "mm_processor_cache_gb": 0,
    }


def read_weights(llm: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights that `llm` reads, under names that it reads. CLIP's and SigLIP's towers (LLaVA, Gemma 3) have
    another name inside in vLLM 0.32 than in transformers 5.19, and LLaVA's has no layer behind the one that is read."""
    towers = [tower for tower in llm.apply_model(_named_tower) if tower is not None]
    for name, tensor in tensors:
        begin, is_of_tower, rest = name.partition("vision_tower.")
        if is_of_tower and towers:
            rest = rest.removeprefix("vision_model.")
            layer = _TOWER_LAYER.match(rest)
            if layer is not None and int(layer[1]) >= towers[0].layers:
                continue
            if rest.startswith("post_layernorm.") and not towers[0].has_last_norm:
                continue
            name = f"{begin}vision_tower.vision_model.{rest}"
        yield name, tensor


class _NamedTower(NamedTuple):
    layers: int
    has_last_norm: bool


def _named_tower(model: Any) -> _NamedTower | None:
    """The tower of vLLM's model, if its name there is another."""
    tower = getattr(getattr(model, "vision_tower", None), "vision_model", None)
    return None if tower is None else _NamedTower(len(tower.encoder.layers), tower.post_layernorm is not None)


def _nothing_made(*given: Any, **named: Any) -> Any:
    raise NotImplementedError("prompts come with their tokens and pixels")


@contextlib.contextmanager
def _torchvision_named() -> Iterator[None]:
    """Inside, `import torchvision` finds modules without content where it is not installed. What vLLM's models import
    of transformers' processors imports it, and none of these is used."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    names = (
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    )
    made = {name: ModuleType(name) for name in names}
    for name, module in made.items():
        owner, _, leaf = name.rpartition(".")
        if owner:
            setattr(made[owner], leaf, module)
    sys.modules.update(made)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it says that torchvision is missing
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        for name in names:
            sys.modules.pop(name, None)


def _of_one_size(image: PlacedImage, token_id: int) -> dict[str, tuple[torch.Tensor, bool]]:
    return {"pixel_values": (image.values[0], False)}


def _by_grid(image: PlacedImage, token_id: int) -> dict[str, tuple[torch.Tensor, bool]]:
    assert image.grid_3 is not None
    return {"pixel_values": (image.values, True), "image_grid_thw": (image.grid_3, False)}


def _by_size(image: PlacedImage, token_id: int) -> dict[str, tuple[torch.Tensor, bool]]:
    assert image.cut_3 is not None
    return {"pixel_values": (image.values, False), "image_sizes": (image.cut_3[1:], False)}


def _with_count(image: PlacedImage, token_id: int) -> dict[str, tuple[torch.Tensor, bool]]:
    return {"pixel_values": (image.values, True), "num_patches": (torch.tensor(1), False)}


def _with_mask(image: PlacedImage, token_id: int) -> dict[str, tuple[torch.Tensor, bool]]:
    height, width = image.values.shape[-2:]
    mask = torch.ones(1, height, width, dtype=torch.bool)
    return {**_with_count(image, token_id), "pixel_attention_mask": (mask, True)}


def _with_tiles(image: PlacedImage, token_id: int) -> dict[str, tuple[torch.Tensor, bool]]:
    return {
        "pixel_values": (image.values, True),
        "image_num_patches": (torch.tensor(1), False),
        "image_token_id": (torch.tensor(token_id), False),
    }


# What vLLM's model of a family takes of an image (0.32, `_get_mm_fields_config` of its processor), and whether images
# of a batch are joined along the first dimension; else they are stacked.
_FIELDS: dict[str, Callable[[PlacedImage, int], dict[str, tuple[torch.Tensor, bool]]]] = {
    "qwen2_vl": _by_grid,
    "qwen2_5_vl": _by_grid,
    "qwen3_vl": _by_grid,
    "llava": _of_one_size,
    "llava_next": _by_size,
    "llava_onevision": _by_size,
    "gemma3": _with_count,
    "idefics3": _with_mask,
    "smolvlm": _with_mask,
    "internvl": _with_tiles,
}
