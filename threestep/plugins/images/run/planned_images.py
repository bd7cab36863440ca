"""The memory that images add to a forward, which a dry run alone asks for."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from threestep.plugins.images.flags import ImageArguments
from threestep.plugins.images.pixels import pixel_inputs
from threestep.plugins.images.run.image_reader import picture_of_model
from training.utils.base.machine import MemoryLine
from training.utils.models.families import is_beside_language
from training.utils.models.settings import keeping_all
from training.utils.plugins.registry import plugin_module

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from threestep.plugins.images.pixels import ImagePixels
    from training.utils.flags.added import AddedFlags


@dataclass(frozen=True)
class PlannedImages:
    """pixels: of a picture that stands for all. tokens: that it takes. most: tokens of pictures in a forward. at_once:
    in all forwards that are laid out together, whose pixels are in memory until the last is done."""

    pixels: ImagePixels
    tokens: int
    most: int
    at_once: int

    @property
    def sentence(self) -> str:
        return f"images: assumes {self.most:,} image tokens per forward pass; fewer need less memory"

    def times(self, of_one: float) -> int:
        """Bytes of all pictures of a forward, from those of one."""
        return int(of_one * self.most / self.tokens)

    def of_tokens(self, tokens: int) -> PlannedImages:
        """The same for forwards whose pictures take so many tokens."""
        return replace(self, most=tokens, at_once=tokens)

    def kept(self, added: AddedFlags) -> MemoryLine:
        """See `PlannedMedia`."""
        most_mb = added.of(ImageArguments).kept_image_features_mb
        return MemoryLine("images: kept features", 0, most_mb * 2**20)

    def lines(self, model: Any, gradient_checkpointing: bool = False, beside: int | None = None) -> list[MemoryLine]:
        """Return what pictures add to a forward of `model`, a model on the meta device; nothing of one of text.

        beside: bytes that the language model's forward saves for a backward, after the pictures are read; None: it has
        no backward. Then, and while a frozen tower reads, one of its blocks is held at a time.
        """
        is_beside = is_beside_language(model)
        if not any(is_beside(name) for name, _ in model.named_parameters()):
            return []
        values, size = self.pixels.values, model.dtype.itemsize
        own = values.numel() * (values.element_size() + (size if model.dtype != values.dtype else 0))
        saved = 0
        if beside is not None:
            counted = saved_by_picture(model, self.pixels, keep_all=gradient_checkpointing)
            saved = counted.held(gradient_checkpointing)
        block = max(saved_by_picture(model, self.pixels, trains=True, keep_all=True).layers, default=0)
        activations = max(self.times(saved), self.times(block) - (beside or 0))
        embedded = self.tokens * model.config.get_text_config().hidden_size * size
        return [
            MemoryLine("images: pixels", own * self.at_once // self.tokens),
            MemoryLine("images: embeddings", self.times(embedded)),
            MemoryLine("images: activations of tower and projector", activations),
        ]


def planned_images(name_or_path: str, trust_remote_code: bool, most: int, at_once: int) -> PlannedImages | None:
    """Return a picture as a model's processor makes it, for rows with images; None without files of tokenizer and image
    processor. most, at_once: see `PlannedImages`."""
    seen = picture_of_model(name_or_path, trust_remote_code)
    return None if seen is None else PlannedImages(*seen, most, at_once)


def saved_by_picture(model: PreTrainedModel, pixels: ImagePixels, trains: bool = False, keep_all: bool = False) -> Any:
    """Count the bytes that tower and projector save of these pictures. `model` is on meta; a copy of its tower that is
    cut to a few blocks, with weights of zeros, reads them on the CPU, where the shapes of pictures are known.

    trains: as if all of its weights were trained; otherwise as in `model`. keep_all: parts that keep less keep all that
    autograd saves. Returns SavedActivations of a dry run.
    """
    dry_run = plugin_module("plan", "dry_run.activations")
    tower = copy.deepcopy(model)
    read: Any = getattr(model.config, "vision_feature_layer", -1)  # of LLaVA: blocks whose states are read
    depth = _cut_tower(tower, max(2, *map(abs, read if isinstance(read, list) else [read])))
    is_beside = is_beside_language(tower)
    weights = list[torch.Tensor]()
    for name, part in [*tower.named_parameters(), *tower.named_buffers()]:
        if is_beside(name):
            owner, _, leaf = name.rpartition(".")
            module, real = tower.get_submodule(owner), torch.zeros(part.shape, dtype=part.dtype)
            if isinstance(part, nn.Parameter):
                module._parameters[leaf] = nn.Parameter(real, requires_grad=trains or part.requires_grad)
            else:
                module._buffers[leaf] = real
            weights.append(real)
    counting = dry_run.SavedTensors({part.untyped_storage()._cdata for part in weights})
    blocks = [part for name, part in tower.named_modules() if is_beside(name) and _is_block(part)]
    dry_run.counted_apart(blocks, counting)
    base, given = tower.base_model, pixel_inputs(tower.config, pixels)
    with (
        keeping_all(tower.modules() if keep_all else []),
        torch.autograd.graph.saved_tensors_hooks(counting, lambda tensor: tensor),
    ):
        base.get_image_features(given.pop("pixel_values").to(tower.dtype), **given, return_dict=True)
    largest = max((counting.bytes[id(block)] for block in blocks), default=0)
    return dry_run.SavedActivations((largest,) * depth, counting.bytes[0], counting.boundary, counting.widest)


def _is_block(module: nn.Module) -> bool:
    return isinstance(module, GradientCheckpointingLayer)


def _cut_tower(model: PreTrainedModel, blocks: int) -> int:
    """Leave so many blocks of the tower; return how many there were."""
    is_beside, depth = is_beside_language(model), 0
    for name, part in list(model.named_modules()):
        if isinstance(part, nn.ModuleList) and is_beside(name) and len(part) and all(map(_is_block, part)):
            depth += len(part)
            del part[blocks:]
    return depth
