"""A head is lent in eval mode, and under ZeRO-3 as a copy with the weights that it has now."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.mtp.head import new_head
from threestep.plugins.mtp.training import WholeHead


def test_what_is_lent():
    model = tiny_causal_lm("llama")
    head = new_head(model, 1, 0).train()

    def whole_of(stage: int) -> WholeHead:
        engine = SimpleNamespace(
            module=head,
            settings=SimpleNamespace(zero_stage=stage),
            ranks=SimpleNamespace(device=torch.device("cpu")),
            full_tensors=lambda module: iter(module.state_dict().items()),
        )
        return WholeHead(engine, lambda: new_head(model, 1, 1))

    with whole_of(2).lent() as lent:
        assert lent is head and not head.training
    assert head.training
    whole = whole_of(3)
    for _ in range(2):
        with torch.no_grad():
            head.depths[0].eh_proj.weight.add_(1.0)
        with whole.lent() as lent:
            assert lent is not head and not lent.training
            for name, weight in lent.named_parameters():
                assert torch.equal(weight, head.get_parameter(name)) and not weight.requires_grad
