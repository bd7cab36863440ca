"""A model of text has no projector that could be frozen."""

from __future__ import annotations

import pytest

from tests.support.tiny_models import tiny_causal_lm
from training.utils.base.errors import ThreestepError
from training.utils.loading.freezing import freeze_parts
from training.utils.models.settings import ModelSettings


def trained(model) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def test_a_text_model_has_no_projector_to_freeze():
    model = tiny_causal_lm("llama")
    freeze_parts(model, ModelSettings("m"))
    assert trained(model) == {name for name, _ in model.named_parameters()}
    with pytest.raises(ThreestepError, match="^--freeze_projector expects a model of images and text .* got LlamaFor"):
        freeze_parts(model, ModelSettings("m", freeze_projector=True))
