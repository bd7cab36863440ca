"""The divergence at the output layer, chunk by chunk, is that of whole logits, and so are its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from threestep.plugins.distillation.divergence import divergence
from threestep.plugins.distillation.head_loss import NUMBERS_PER_LOGIT, compared_at_head, rows_of_chunk
from threestep.plugins.distillation.settings import DivergenceSettings
from training.utils.models.token_model import TargetHead

TOKENS, WIDTH, VOCABULARY = 7, 5, 11


def made(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def head_of(with_bias: bool) -> TargetHead:
    layer = nn.Linear(WIDTH, VOCABULARY, bias=with_bias, dtype=torch.float64)
    with torch.no_grad():
        for number, weight in enumerate(layer.parameters()):
            weight.copy_(made(10 + number, *weight.shape))
    return TargetHead(layer)


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_chunks_equal_whole_logits(rows: int, with_bias: bool):
    head, teacher = head_of(with_bias), torch.log_softmax(made(1, TOKENS, VOCABULARY), dim=-1)
    copies = torch.tensor([1, 3, 1, 1, 2, 1, 1])
    settings = DivergenceSettings("js", 0.3)

    def compare(logits: torch.Tensor, here: slice) -> tuple[torch.Tensor, torch.Tensor]:
        found = divergence(torch.log_softmax(logits / 0.7, dim=-1), teacher[here], settings)
        return found, torch.full_like(found.detach(), 0.25)

    got = {}
    for how in ("whole", "chunks"):
        hidden = made(2, TOKENS, WIDTH).requires_grad_()
        if how == "whole":
            found, _ = compare(functional.linear(hidden, head.weight, head.bias), slice(None))
            total = (found * copies).sum()
        else:
            total, covered = compared_at_head(hidden, head, copies, compare, rows=rows)
            assert covered.item() == pytest.approx(0.25 * 10) and not covered.requires_grad
        inputs = [hidden, *head.parameters()]
        got[how] = [total.detach(), *torch.autograd.grad(3.0 * total, inputs)]  # a scaled loss
    for whole, chunks in zip(got["whole"], got["chunks"], strict=True):
        torch.testing.assert_close(chunks, whole, rtol=1e-12, atol=1e-13)


def test_a_frozen_layer_and_no_tokens():
    head = head_of(True)
    head.requires_grad_(False)

    def compare(logits: torch.Tensor, here: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return logits.square().sum(dim=-1), torch.ones(len(logits))

    hidden = made(3, 2, WIDTH).requires_grad_()
    total, _ = compared_at_head(hidden, head, torch.ones(2), compare, rows=1)
    total.backward()
    logits = functional.linear(hidden.detach(), head.weight, head.bias)
    torch.testing.assert_close(hidden.grad, 2.0 * logits @ head.weight)
    nothing, _ = compared_at_head(hidden[:0], head, torch.ones(0), compare, rows=1)
    assert nothing.item() == 0.0
    with torch.no_grad():
        read, _ = compared_at_head(hidden, head, torch.ones(2), compare, rows=2)
    assert read.item() == pytest.approx(total.item()) and not read.requires_grad


def test_a_chunk_takes_no_more_than_its_bytes():
    assert rows_of_chunk(4 * NUMBERS_PER_LOGIT * 11 * 3, 11) == 3 and rows_of_chunk(1, 11) == 1
