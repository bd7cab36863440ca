"""Dropout rates, in the configuration and in the modules."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from training.utils.models.dropout import set_dropout


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "qwen3", "gemma2"])
def test_dropout_is_set_everywhere(family):
    changes = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1} if family == "gpt2" else {}
    changes = {"dropout": 0.1, "attention_dropout": 0.1} if family == "opt" else changes
    model = tiny_causal_lm(family, **changes)
    ids = torch.arange(3, 15)[None]

    def differs() -> bool:
        model.train()
        with torch.no_grad():
            return not torch.equal(model(ids).logits, model(ids).logits)

    set_dropout(model, 0.0)
    assert not differs()
    set_dropout(model, 0.5)
    assert differs()
    set_dropout(model, 0.0)
    assert not differs()
