"""A step of policy losses by their written formulas, one token at a time, and by the package's own functions however it
is split."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from training.step3_ppo.losses import AGGREGATIONS, POLICY_LOSSES
from training.step3_ppo.losses.losses import PolicyLossSettings, PolicyTokens, StepTotals

LONGEST = 9
CLIPS = {"clip_low": 0.15, "clip_high": 0.3, "dual_clip": 2.0}


class Response(NamedTuple):
    """Columns of one response, float64; `counts` is False where it is left out of the loss."""

    logprobs: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor
    noise: torch.Tensor
    counts: bool


def random_step(lengths: list[int], seed: int) -> list[Response]:
    generator = torch.Generator().manual_seed(seed)
    step = []
    for index, length in enumerate(lengths):
        old, advantages, move = torch.randn(3, length, generator=generator, dtype=torch.float64)
        noise = torch.rand(length, generator=generator, dtype=torch.float64)
        step.append(Response(old + 0.4 * move, old, advantages, noise, counts=(index + seed) % 4 != 3))
    return step


def held(ratio: float) -> float:
    return min(max(ratio, 1 - 0.15), 1 + 0.3)


def clipped(ratio: float, a: float) -> float:
    return -min(ratio * a, held(ratio) * a)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def ppo(d, a, logp, row, picked) -> float:
    """row: (d, a) of its sequence. picked: a token that the loss treats apart."""
    loss = clipped(math.exp(d), a)
    return min(loss, -2.0 * a) if a < 0 else loss


# Weight of one token of a sequence of `own` tokens in a step of `tokens` tokens and `sequences` sequences.
WEIGHTS = {
    "token-mean": lambda own, tokens, sequences: 1 / tokens,
    "seq-mean-token-sum": lambda own, tokens, sequences: 1 / sequences,
    "seq-mean-token-mean": lambda own, tokens, sequences: 1 / (sequences * own),
    "seq-mean-token-sum-norm": lambda own, tokens, sequences: 1 / (sequences * LONGEST),
}


def columns(items: list[Response], place: int) -> torch.Tensor:
    return torch.cat([torch.empty(0, dtype=torch.float64), *(item[place] for item in items)])


def naive(step: list[Response], formula: Callable[..., float], aggregation: str, picked: list[list[bool]]) -> float:
    """picked: of the responses that count."""
    rows = [[column.tolist() for column in item[:3]] for item in step if item.counts]
    tokens, total = sum(len(row[0]) for row in rows), 0.0
    for (logprobs, olds, advantages), apart in zip(rows, picked, strict=True):
        own = [(new - old, a) for new, old, a in zip(logprobs, olds, advantages, strict=True)]
        for (d, a), logp, is_picked in zip(own, logprobs, apart, strict=True):
            total += formula(d, a, logp, own, is_picked) * WEIGHTS[aggregation](len(own), tokens, len(rows))
    return total


def dealt(
    step: list[Response], loss: str, aggregation: str, parts: list[list[int]], picked: list[torch.Tensor], options=None
) -> tuple[float, torch.Tensor]:
    """The step's loss and gradient from `parts`, micro-batches of any ranks, by the package's own functions. picked:
    tokens of each response that are treated apart."""
    counted = [item for item in step if item.counts]
    totals = StepTotals(sum(len(item.old) for item in counted), len(counted), LONGEST)
    leaves = [item.logprobs.clone().requires_grad_() for item in step]
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        items = [step[index] for index in part]
        lengths = torch.tensor([len(item.old) for item in items], dtype=torch.int64)
        sequence_M = torch.repeat_interleave(torch.arange(len(items)), lengths)
        counted_M = torch.repeat_interleave(torch.tensor([float(item.counts) for item in items]).double(), lengths)
        logprobs_M = torch.cat([torch.empty(0, dtype=torch.float64), *(leaves[index] for index in part)])
        picked_M = torch.cat([torch.empty(0, dtype=torch.bool), *(picked[index] for index in part)])
        tokens = PolicyTokens(logprobs_M, columns(items, 1), columns(items, 2), sequence_M, picked_M)
        loss_M, _ = POLICY_LOSSES[loss].loss(tokens, PolicyLossSettings(**CLIPS, options=options))
        total = total + (loss_M * AGGREGATIONS[aggregation](counted_M, sequence_M, totals)).sum()
    total.backward()
    return total.item(), torch.cat([leaf.grad for leaf in leaves])


def check_any_split(
    loss: str,
    formula: Callable[..., float],
    aggregation: str,
    step: list[Response],
    seed: int,
    count: int,
    *,
    picked: list[torch.Tensor] | None = None,
    options=None,
) -> None:
    """The written formula, and the same number and gradient however the step's responses are ordered and dealt."""
    picked = [torch.zeros_like(item.old, dtype=torch.bool) for item in step] if picked is None else picked
    want, want_grad = dealt(step, loss, aggregation, [list(range(len(step)))], picked, options)
    apart = [own.tolist() for item, own in zip(step, picked, strict=True) if item.counts]
    assert abs(want - naive(step, formula, aggregation, apart)) <= 1e-9 * max(1.0, abs(want))
    order = torch.randperm(len(step), generator=torch.Generator().manual_seed(seed)).tolist()
    parts = [order[start::count] for start in range(count)] + [[]]  # some have no response at all
    got, got_grad = dealt(step, loss, aggregation, parts, picked, options)
    assert abs(got - want) <= 1e-9 * max(1.0, abs(want))
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-9, atol=1e-9)
    assert not got_grad[torch.cat([torch.full_like(item.old, float(not item.counts)) for item in step]) > 0].any()
