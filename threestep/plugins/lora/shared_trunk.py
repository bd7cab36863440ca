"""A scalar model on a language model's trunk: the same tensors in separate modules.

Each of the two has adapters, dropout and recomputation, so nothing is switched between their forwards, and
engines, saving and checkpoints see two ordinary models. Adapters freeze the trunk; it must stay frozen.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError
from training.utils.loading.configurations import set_pad_token
from training.utils.loading.models import prepared
from training.utils.models.families import own_scalar_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from training.utils.contracts.media import RunMedia
    from training.utils.models.settings import ModelSettings


def scalar_model_on_trunk(
    model: PreTrainedModel,
    settings: ModelSettings,
    pad_token_id: int,
    longest_tokens: int = 0,
    *,
    media: RunMedia | None = None,
) -> PreTrainedModel:
    """Return a scalar model, as `load_scalar_model` does, with the trunk parameters of `model` and a zero head.

    `model` has no adapters yet; `settings` define those of the scalar model. ThreestepError if the family has no such
    class, or one with another trunk.

    longest_tokens, media: see `load_causal_lm`.
    """
    import torch
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as CLASSES

    from training.utils.models.own_forward import read_own_forward

    copied: dict[int, Any] = {}  # parts of the configuration that modules hold too are the same in the copy
    config = copy.deepcopy(model.config, copied)
    config.num_labels = 1
    set_pad_token(config, pad_token_id)
    scalar_class: Any = CLASSES.get(type(config), None) or own_scalar_class(config)
    if scalar_class is not None:
        with torch.device("meta"):
            scalar = scalar_class(config)
    trunk = model.base_model
    if scalar_class is None or type(scalar.base_model) is not type(trunk) or not hasattr(scalar, "score"):
        raise ThreestepError(
            f"--share_trunk: transformers has no scalar head for the trunk of {type(model).__name__}; use another "
            "family, or drop --share_trunk"
        )
    same: dict[int, Any] = {id(parameter): parameter for parameter in trunk.parameters()}
    setattr(scalar, scalar.base_model_prefix, copy.deepcopy(trunk, {**copied, **same}))
    scalar.score.to_empty(device=model.device).to(model.dtype)
    torch.nn.init.zeros_(scalar.score.weight)
    read_own_forward(scalar, longest_tokens, media)
    return prepared(scalar, settings)
