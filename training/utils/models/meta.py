"""Models without weights: every shape and every name, on torch's meta device, from a configuration alone.

What a dry run and the recipes' tests look at. A hub name costs a download of its configuration, and no more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from training.utils.models.loading import load_config, prepared
from training.utils.models.settings import ModelSettings
from training.utils.run.errors import ThreestepError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def causal_lm_on_meta(settings: ModelSettings, dtype: torch.dtype) -> PreTrainedModel:
    """Return what `load_causal_lm` would load, in train mode, LoRA and dropout in place, its weights on the meta
    device. The vocabulary is the configuration's: tokens that a tokenizer gains are not counted."""
    from transformers import AutoModelForCausalLM

    return _built(AutoModelForCausalLM, settings, dtype)


def scalar_model_on_meta(settings: ModelSettings, dtype: torch.dtype) -> PreTrainedModel:
    """The same for `load_scalar_model`."""
    from transformers import AutoModelForSequenceClassification

    return _built(AutoModelForSequenceClassification, settings, dtype, num_labels=1)


def _built(auto_class: Any, settings: ModelSettings, dtype: torch.dtype, **config: Any) -> PreTrainedModel:
    import torch

    found = load_config(settings.name_or_path, settings.trust_remote_code)
    for name, value in config.items():
        setattr(found, name, value)
    try:
        with torch.device("meta"):
            model = auto_class.from_config(found, dtype=dtype)
            # Recomputation and compiling change no weight; what they change of memory the estimate works out itself.
            model = prepared(model, replace(settings, gradient_checkpointing=False, torch_compile=False), False)
            for part in model.parameters():  # adapters follow their layer's precision, but not on the meta device
                part.data = part.data.to(dtype)
    except ValueError as problem:
        raise ThreestepError(f"'{settings.name_or_path}' describes no model that can be built: {problem}") from problem
    return model.train()
