"""Freezing of weights beside a language model: those of a tower and its projector."""

from __future__ import annotations

from typing import TYPE_CHECKING

from training.utils.models.adapters.lora import is_adapter_tensor
from training.utils.models.families.parts import is_beside_language, is_of_projector, refuse_without_projector

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.models.settings import ModelSettings


def freeze_parts(model: PreTrainedModel, settings: ModelSettings) -> None:
    """Freeze tower and projector where `settings` say so, but for adapters that they have. A text model has neither.

    ThreestepError for `--freeze_projector` where there is none.
    """
    is_beside = is_beside_language(model)
    weights = {name: part for name, part in model.named_parameters() if is_beside(name)}
    if settings.freeze_projector and not any(map(is_of_projector, weights)):
        refuse_without_projector(model)
    for name, weight in weights.items():
        frozen = settings.freeze_projector if is_of_projector(name) else settings.freeze_vision_tower
        if frozen and not is_adapter_tensor(name):
            weight.requires_grad_(False)
