"""Models on the meta device: what they are, and what cannot build a model from."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.lora_settings import lora_settings
from threestep.plugins.plan.dry_run.meta import model_on_meta
from training.utils.base.errors import ThreestepError
from training.utils.models.settings import ModelSettings

SHAPE = dict(model_type="llama", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             vocab_size=64)  # fmt: skip


def settings(tmp_path, config: dict, **loading) -> ModelSettings:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return lora_settings(str(tmp_path), **loading)


def test_adapters_and_a_scalar_head_train_and_nothing_has_memory(tmp_path):
    loading = settings(tmp_path, SHAPE, lora_dim=2, lora_module_name="q_proj")
    model = model_on_meta(loading, torch.bfloat16, scores=True)
    assert {part.device.type for part in model.parameters()} == {"meta"}
    assert {part.dtype for part in model.parameters()} == {torch.bfloat16}
    # the head of one label, and in each of two layers A and B of rank 2 at a matrix of 32 x 32
    assert sum(part.numel() for part in model.parameters() if part.requires_grad) == 32 + 2 * 2 * (2 * 32)


def test_dropout_is_set_and_checkpointing_left_to_the_estimate(tmp_path):
    loading = settings(tmp_path, SHAPE, dropout=0.25, gradient_checkpointing=True)
    model = model_on_meta(loading, torch.float32)
    assert model.config.attention_dropout == 0.25 and not model.is_gradient_checkpointing and model.training


def test_a_configuration_of_something_else_is_refused(tmp_path):
    with pytest.raises(ThreestepError, match="Unrecognized configuration class"):
        model_on_meta(settings(tmp_path, {"model_type": "vit"}), torch.float32)
