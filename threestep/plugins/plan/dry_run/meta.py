"""Models without weights: every shape and name, on torch's meta device, from a configuration alone.

For dry runs and the recipes' tests. Of a hub name only the configuration is downloaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from training.utils.loading.configurations import config_of, errors_explained
from training.utils.loading.models import prepared

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from training.utils.models.settings import ModelSettings


def as_counted(settings: ModelSettings) -> ModelSettings:
    """Return settings of the same model without values, whose memory and work a dry run counts."""
    counted = tuple(each for each in settings.preparers if each.of_counted)
    return replace(settings, gradient_checkpointing=False, preparers=counted)


def model_on_meta(settings: ModelSettings, dtype: torch.dtype, scores: bool = False) -> PreTrainedModel:
    """Return the model that `load_causal_lm`, or for `scores` `load_scalar_model`, would load, in train mode with LoRA
    and dropout, its weights on the meta device. The vocabulary is the configuration's, without tokens added to the
    tokenizer."""
    import torch

    from training.utils.models.families import language_model_class, scalar_model_class

    config = config_of(settings)
    config.pad_token_id = None  # some families look for it in the ids, which have no values here
    auto_class = language_model_class(config, with_media=False)
    if scores:
        auto_class, config.num_labels = scalar_model_class(config), 1
    with (
        errors_explained("a model with the shape in config.json", settings.name_or_path, Exception),
        torch.device("meta"),
    ):
        model = auto_class.from_config(config, dtype=dtype)
        counted = as_counted(settings)
        for preparer in counted.preparers:
            preparer.before_device(model, None)
        # Recomputation and most preparers change no weight; the estimate counts the memory that they change.
        model = prepared(model, counted, False)
        for part in model.parameters():  # adapters follow their layer's precision, but not on the meta device
            part.data = part.data.to(dtype)
    return model.train()
