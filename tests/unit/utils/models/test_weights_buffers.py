"""Casts of a whole model leave its buffers alone."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from training.utils.models.weights import buffers_kept


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_cast_module_keeps_its_buffers(family):
    """As DeepSpeed 0.19.0 casts the module that it takes."""
    model = tiny_causal_lm(family)
    were = copy.deepcopy(dict(model.named_buffers()))
    with buffers_kept(model):
        model.bfloat16()
    assert model.dtype is torch.bfloat16
    for name, buffer in model.named_buffers():
        assert buffer.dtype is were[name].dtype and torch.equal(buffer, were[name]), name
    assert sum("inv_freq" in name for name in were) >= 2
