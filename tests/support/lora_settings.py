"""Settings of models with LoRA."""

from __future__ import annotations

import dataclasses
from typing import Any

from threestep.plugins.lora.adding import add_lora
from threestep.plugins.lora.preparers import Lora
from training.utils.models.settings import ModelSettings

_OWN = {field.name for field in dataclasses.fields(Lora)}


def lora_settings(name_or_path: str, **given: Any) -> ModelSettings:
    """Return settings of a model that gets adapters if `given` has a `lora_dim` above 0: fields of either."""
    own = {name: value for name, value in given.items() if name in _OWN}
    settings = ModelSettings(name_or_path, **{name: value for name, value in given.items() if name not in _OWN})
    if not own.get("lora_dim"):
        return settings
    return dataclasses.replace(settings, preparers=(*settings.preparers, Lora(**own)))


def with_lora(model: Any, dim: int) -> Any:
    """Return the model with adapters of this rank, in place; none for 0."""
    return add_lora(model, Lora(dim)) if dim else model
