"""Forwards of a model of images and text with kept features of pictures (`images.kept_features`).

Kept is what goes into the projector, the last part before the embeddings, or, where the projector is frozen as well,
what comes out of it. A picture's features are made by themselves, whatever else a micro-batch holds, so that a run
that is resumed makes the same.

E tokens of images.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from threestep.plugins.images.pixels import FEATURE_READER, ImagePixels, pixel_inputs
from training.utils.models.families import is_beside_language, is_of_projector

if TYPE_CHECKING:
    from threestep.plugins.images.kept_features import KnownPictures, Picture

_ARGUMENT = "mm_encoder_outputs"  # of forward: what a tower made of images (transformers 5.19)


@dataclass(frozen=True)
class FeatureReader:
    """model: as transformers made it. projector: if it trains; None where what it makes is kept. form: of the one
    tensor in which forward takes the embeddings of all images, the dimensions between the first and the last (tokens of
    a tile, SmolVLM); None where it takes a list of tensors."""

    model: Any
    projector: nn.Module | None
    form: tuple[int, ...] | None

    def features(self, pixels: ImagePixels) -> torch.Tensor:
        """The features of one picture that are kept."""
        found: list[torch.Tensor] = []
        hook = self.projector and self.projector.register_forward_pre_hook(lambda _, given: found.append(given[0]))
        try:
            with torch.no_grad():
                embedded = _made(self.model, pixels).pooler_output
        finally:
            if hook:
                hook.remove()
        return found[0] if found else _one_tensor(embedded)

    def inputs(self, pixels: ImagePixels, known: KnownPictures) -> dict[str, Any]:
        """Return the arguments of forward in place of pixels; keep what is made of pictures that are new."""
        made = {}
        for picture, own in zip(known.missing, _each_picture(pixels, known.missing), strict=True):
            features = known.store.find(picture)  # another model may have read it since the rows were laid out
            if features is None:
                features = self.features(own)
                known.store.keep(picture, features)
            made[picture] = features.to(own.values.device)
        parts, at = [], 0
        for picture, length in zip(known.pictures, known.lengths, strict=True):
            if length is None:
                parts.append(made[picture])
            else:
                assert known.features is not None
                parts.append(known.features[at : at + length])
                at += length
        joined = torch.cat(parts)
        embedded_EH = joined if self.projector is None else _one_tensor(self.projector(joined))
        given: Any = [embedded_EH] if self.form is None else embedded_EH.view(-1, *self.form, embedded_EH.shape[-1])
        return {_ARGUMENT: {"image": BaseModelOutputWithPooling(pooler_output=given)}}


def open_feature_reader(model: Any, example: ImagePixels, shares: Any = None) -> str | None:
    """Have `model` read pictures whose features are kept; or return why it cannot.

    example: pixels of a picture. shares: a model that reads kept features, whose `model` is to read too.
    """
    is_beside = is_beside_language(model)
    weights = {name: part for name, part in model.named_parameters() if is_beside(name)}
    if any(part.requires_grad for name, part in weights.items() if not is_of_projector(name)):
        return "its vision tower is trained"
    if any(hasattr(part, "ds_id") for part in weights.values()):
        return "its vision tower is sharded, and all ranks must gather it together (ZeRO-3)"
    if _draws(model.config.vision_config):
        return "its vision tower has dropout"
    if _ARGUMENT not in inspect.signature(model.base_model.forward).parameters:
        return f"its forward pass accepts no features ({_ARGUMENT})"
    projectors = [part for name, part in model.named_modules() if is_beside(name) and _begins_projector(name)]
    trained = [part for part in projectors if any(weight.requires_grad for weight in part.parameters())]
    shared: FeatureReader | None = None if shares is None else getattr(shares, FEATURE_READER)
    if shared is not None:
        if shared.projector is None and trained:
            return "its projector is trained"
        if not _same_weights(shares, model, with_projector=shared.projector is None):
            return "its vision tower or projector has different weights"
        trained = [] if shared.projector is None else projectors
    returned: list[torch.Tensor] = []
    hooks = [part.register_forward_hook(lambda module, given, made: returned.append(made)) for part in trained]
    try:
        with torch.no_grad():
            made = _made(model, example)
    finally:
        for hook in hooks:
            hook.remove()
    if getattr(made, "deepstack_features", None) is not None:
        return "its language model reads features from several layers of the tower"
    first = made.pooler_output[0]
    # The same memory: nothing is done with them in between, such as another order (Qwen2.5-VL).
    if trained and [first.untyped_storage().data_ptr()] != [part.untyped_storage().data_ptr() for part in returned]:
        return "its projector is trained, and its output is changed before it is read (--freeze_projector true)"
    form = tuple(made.pooler_output.shape[1:-1]) if isinstance(made.pooler_output, torch.Tensor) else None
    reader = FeatureReader(model, trained[0] if trained else None, form)
    if shared is not None and not torch.equal(reader.features(example), shared.features(example)):
        return "its tower computes different features for an image"
    setattr(model, FEATURE_READER, reader)
    return None


def forget_feature_reader(model: Any) -> None:
    """Have `model` read pixels again."""
    delattr(model, FEATURE_READER)


def _each_picture(pixels: ImagePixels, pictures: tuple[Picture, ...]) -> Iterator[ImagePixels]:
    """The pixels of each picture by itself."""
    at = begin = 0
    for _, spans in pictures:
        length = sum(pixels.counts[at : at + spans])
        grids_I3, cuts_I3 = (
            None if of_each is None else of_each[at : at + spans] for of_each in (pixels.grids_I3, pixels.cuts_I3)
        )
        yield ImagePixels(pixels.values[begin : begin + length], grids_I3, cuts_I3)
        at, begin = at + spans, begin + length


def _made(model: Any, pixels: ImagePixels) -> Any:
    """Features of pictures by `model`; their embeddings, in its form, are `pooler_output`."""
    given = pixel_inputs(model.config, pixels)
    values = given.pop("pixel_values").to(model.dtype)
    return model.base_model.get_image_features(values, **given, return_dict=True)


def _same_weights(one: Any, other: Any, with_projector: bool) -> bool:
    """True if both have a tower of the same weights, to the bit, and with `with_projector` a projector too."""
    return all(
        mine is not None and yours is not None and mine.dtype == yours.dtype and torch.equal(mine, yours)
        for mine, yours in zip_longest(_tower(one, with_projector), _tower(other, with_projector))
    )


def _tower(model: Any, with_projector: bool) -> list[torch.Tensor]:
    is_beside = is_beside_language(model)
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [part for name, part in tensors if is_beside(name) and (with_projector or not is_of_projector(name))]


def _one_tensor(embedded: Any) -> torch.Tensor:
    """Return [E, H]."""
    embedded = embedded if isinstance(embedded, torch.Tensor) else torch.cat(list(embedded))
    return embedded.flatten(0, -2)


def _begins_projector(name: str) -> bool:
    return is_of_projector(name) and not is_of_projector(name.rpartition(".")[0])


def _draws(vision_config: Any) -> bool:
    rates = {name: rate for name, rate in vision_config.to_dict().items() if "drop" in name}
    return any(isinstance(rate, float) and rate > 0 for rate in rates.values())
