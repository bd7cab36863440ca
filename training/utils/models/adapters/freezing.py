"""Freezing of a model's vision tower and projector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.utils.base.errors import ThreestepError
from training.utils.images.models.vision import is_of_projector, is_of_vision
from training.utils.models.adapters.lora import is_adapter_tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.models.settings import ModelSettings


def freeze_vision(model: PreTrainedModel, settings: ModelSettings) -> None:
    """Freeze tower and projector where `settings` say so, but for adapters that they have. A text model has neither.

    ThreestepError for `--freeze_projector` where there is none.
    """
    of_vision = is_of_vision(model)
    weights = {name: part for name, part in model.named_parameters() if of_vision(name)}
    if settings.freeze_projector and not any(map(is_of_projector, weights)):
        raise ThreestepError(
            f"--freeze_projector expects a model of images and text with a projector that is known by its name, got "
            f"{type(model).__name__}; leave it out"
        )
    for name, weight in weights.items():
        frozen = settings.freeze_projector if is_of_projector(name) else settings.freeze_vision_tower
        if frozen and not is_adapter_tensor(name):
            weight.requires_grad_(False)
