"""Derivatives that tensors carry through functions, beside torch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.func import jvp
from torch.nn import functional

from threestep.plugins.explain.forward.moving import CannotMoveError, moves_of, moving

CASES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a linear layer": lambda x, w: functional.linear(x, w),
    "one with a bias that moves": lambda x, w: functional.linear(x, w, w[0]),
    "one whose weight stands still": lambda x, w: functional.linear(x, torch.ones(4, 4).double(), w[:, 0]),
    "one of constants": lambda x, w: functional.linear(torch.ones(2, 4).double(), w, torch.ones(4).double()) + x[0, :2],
    "products": lambda x, w: x * w[0] * 2.0 + 3.0 * (x @ w),
    "a product of shapes that are broadcast": lambda x, w: w[:, :1] * w[:1] + torch.ones(5, 4, 4).double() * w,
    "a square": lambda x, w: x * x,
    "sums": lambda x, w: 1.0 - (x - w[:3]) - w[0] + torch.ones(2, 3, 4).double(),
    "sums with a factor": lambda x, w: torch.add(x, w[:3], alpha=2.0),
    "a norm": lambda x, w: w[0] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "views": lambda x, w: x.reshape(2, 3, 2, 2).transpose(1, 2).unsqueeze(1).expand(2, 2, 2, 3, 2).contiguous().mT,
    "parts": lambda x, w: (
        torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1) + torch.cat((x[..., 2:], torch.ones(2, 3, 2)), -1)
    ),
    "a stack": lambda x, w: torch.stack([x[0, 0], w[1], torch.ones(4).double()]),
    "a softmax": lambda x, w: functional.softmax(x @ w, dim=-1, dtype=torch.float64) @ w,
    "functions of each number": lambda x, w: functional.silu(x) * torch.tanh(w[0]) + functional.gelu(x).exp(),
    "a quotient": lambda x, w: x / 3.0 + x / (w[0].square() + 1.0),
    "an embedding": lambda x, w: functional.embedding(torch.tensor([[0, 2], [1, 1]]), w) * x[0, 0],
    "functions without a rule": lambda x, w: torch.einsum("abc,cd->abd", x.cumsum(1), w).amax(0) + x.std(),
    "numbers that are compared": lambda x, w: torch.where(x > 0.0, x, w[0]) * (x.argmax() + 1),
}


@pytest.mark.parametrize("name", CASES)
def test_a_function_moves_as_torch_says(name: str):
    torch.manual_seed(3)
    x, w = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    other_x, other_w = torch.randn_like(x), torch.randn_like(w)
    directions = [(other_x, other_w), (None, other_w), (other_x, None), (0.5, -2.0), (None, -2.0)]
    found = CASES[name](moving(x, [one for one, _ in directions]), moving(w, [other for _, other in directions]))
    for own, moves in zip(moves_of(found, len(directions)), directions, strict=True):
        start = zip((x, w), moves, strict=True)
        tangents = tuple(
            torch.zeros_like(point) if move is None else point * move if isinstance(move, float) else move
            for point, move in start
        )
        value, right = jvp(CASES[name], (x, w), tangents)
        torch.testing.assert_close(found.as_subclass(torch.Tensor), value, rtol=0.0, atol=1e-13)
        torch.testing.assert_close(own.expand_as(right), right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "write", [lambda x: x.add_(1.0), lambda x: x.__setitem__(0, 1.0), lambda x: functional.silu(x, inplace=True)]
)
def test_a_function_that_writes_is_refused(write: Callable[[torch.Tensor], object]):
    with pytest.raises(CannotMoveError, match="writes into a tensor"):
        write(moving(torch.ones(2), [torch.ones(2)]))


def test_what_stands_still_is_a_plain_tensor():
    point = torch.ones(2)
    assert moving(point, [None, None]) is point
    assert torch.equal(moves_of(point, 2)[1], torch.zeros(2))
