"""Divergences by hand, and of k tokens and the rest."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from threestep.plugins.distillation.divergence import divergence, with_rest
from threestep.plugins.distillation.head_loss import NUMBERS_PER_LOGIT, compared_at_head, rows_of_chunk
from threestep.plugins.distillation.settings import DivergenceSettings
from training.utils.models.token_model import TargetHead

STUDENT, TEACHER = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]


def log(probabilities: list[float]) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


@pytest.mark.parametrize(
    "kind, beta, expected",
    # KL(T, S) = .2 ln(.2/.5) + .2 ln(.2/.3) + .6 ln(.6/.2) = -.183258 - .081093 + .659167
    [("forward", 0.5, 0.394816), ("reverse", 0.5, 0.360062), ("js", 0.1, 0.034637), ("js", 0.5, 0.090566),
     ("js", 0.9, 0.032251)],
)  # fmt: skip
def test_three_tokens_by_hand(kind: str, beta: float, expected: float):
    found = divergence(log(STUDENT), log(TEACHER), DivergenceSettings(kind, beta))
    assert found.tolist() == pytest.approx([expected], abs=1e-6)


def plain(student: list[float], teacher: list[float], kind: str, beta: float) -> float:
    """Line by line: GKD's definition, in Python's floats."""

    def kl(first: list[float], second: list[float]) -> float:
        return sum(p * math.log(p / q) for p, q in zip(first, second, strict=True) if p > 0)

    mixture = [beta * t + (1 - beta) * s for s, t in zip(student, teacher, strict=True)]
    if kind == "js":
        return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)
    return kl(teacher, student) if kind == "forward" else kl(student, teacher)


@pytest.mark.parametrize("kind, beta", [("forward", 0.5), ("reverse", 0.5), ("js", 0.3)])
def test_the_rest_is_one_outcome_and_bounds_from_below(kind: str, beta: float):
    student, teacher = (torch.rand(2, 6, generator=torch.Generator().manual_seed(s)).double() for s in (0, 1))
    student, teacher = (each / each.sum(dim=1, keepdim=True) for each in (student, teacher))
    ids = teacher.topk(3, dim=1).indices
    settings = DivergenceSettings(kind, beta)
    found = divergence(with_rest(student.log(), ids), with_rest(teacher.log(), ids), settings).tolist()
    whole = divergence(student.log(), teacher.log(), settings).tolist()
    for row in range(2):
        parts = [[float(each[row, token]) for token in ids[row]] for each in (student, teacher)]
        coarse = [[*part, 1.0 - sum(part)] for part in parts]
        assert found[row] == pytest.approx(plain(*coarse, kind, beta), rel=1e-9)
        assert whole[row] == pytest.approx(plain(student[row].tolist(), teacher[row].tolist(), kind, beta), rel=1e-9)
        assert 0.0 <= found[row] <= whole[row]


@pytest.mark.parametrize("kind", ["forward", "reverse", "js"])
def test_tokens_that_both_rule_out_count_nothing(kind: str):
    settings = DivergenceSettings(kind, 0.5)
    student = torch.cat([log(STUDENT), torch.tensor([[-torch.inf]]).double()], dim=1).requires_grad_()
    teacher = torch.cat([log(TEACHER), torch.tensor([[-torch.inf]]).double()], dim=1)
    found = divergence(student, teacher, settings)
    [gradient] = torch.autograd.grad(found.sum(), student)
    assert found.tolist() == divergence(log(STUDENT), log(TEACHER), settings).tolist()
    assert gradient[0, 3] == 0.0 and bool(gradient.isfinite().all())


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
