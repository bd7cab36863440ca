"""Weights that are kept are those of their moment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.ahead.kept_model import kept_model
from training.utils.engine.whole_model import WholeModel


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_kept_weights_are_those_of_their_moment(zero_stage):
    trained: Any = tiny_causal_lm("llama").eval()
    ids = torch.tensor([[3, 5, 7]])
    engine: Any = SimpleNamespace(
        settings=SimpleNamespace(zero_stage=zero_stage),
        ranks=SimpleNamespace(device=torch.device("cpu"), is_main=True),
        full_tensors=lambda part: part.named_parameters(),
        updates=4,
    )
    whole = WholeModel(engine, trained)
    with torch.no_grad():
        before = trained(ids).logits
        first = kept_model(whole)
        for weight in trained.parameters():
            weight.mul_(1.5)
        engine.updates = 5
        second, after = kept_model(whole), trained(ids).logits
        assert not torch.equal(before, after)
        for kept, wanted, updates in ((first, before, 4), (second, after, 5), (first, before, 4)):
            assert kept.updates == updates and not kept.is_sharded
            with kept.lent() as model:
                assert not model.training and model is not trained
                assert torch.equal(model(ids).logits, wanted)
    sent: list[str] = []
    first.send(lambda tensors: sent.extend(name for name, _ in tensors))
    assert sent == [name for name, _ in trained.named_parameters()]
