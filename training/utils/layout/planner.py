"""Assigns the documents of an optimizer step to ranks, micro-batches and rows.

The number of sequences per optimizer step, which users set, is kept exactly. The layout is a pure function of (lengths,
settings): all ranks compute the same plan without communication, and all get the same number of micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from training.utils.layout.bounds import forward_bound
from training.utils.layout.dealing import dealt

if TYPE_CHECKING:
    from training.utils.contracts.drawing import RowForm

# Up to this many forwards per rank the planner also tries a few more, and dealing by length; more would take too long.
_MANY = 6

# By cost where that takes this share less time than by tokens: for less, layouts stay as they are.
_LEAST_GAIN = 0.01

# Rows, documents and micro-batches are tuples of indices into the step's documents.
Row = tuple[int, ...]
MicroBatch = tuple[Row, ...]


@dataclass(frozen=True)
class PlanSettings:
    """ranks: data-parallel ranks.
    max_tokens_per_micro_batch: the most tokens in one forward of one rank, padding included. A longer document runs
        alone: splitting it would change the mathematics.
    max_rows_per_micro_batch: without packing, the most documents in one forward; None sets no limit.
    packed: documents may share a row.
    max_row_tokens: the widest packed row; a longer document still gets a row of its own.
    quadratic_tokens: the row width at which attention costs as much as the rest of the layer (6 x hidden size: per
        token, a layer's matrices take 24 h^2 FLOPs forward, attention 4 h for each position of the row). Wide rows
        have less padding and more attention.
    forward_tokens: the cost of another forward, in tokens. More forwards have less padding.
    form: in which responses were drawn; None lays them out in one piece.
    least_shared_tokens: from how many tokens on equal beginnings are shared, beyond a prompt by its responses; 0 never.
    pair_tokens: the cost of a pair of tokens of a document of which one sees the other, in tokens, where attention
        computes no others: 4 h of 24 h^2 FLOPs. 0 where it computes whole rows.
    """

    ranks: int
    max_tokens_per_micro_batch: int | None = None
    max_rows_per_micro_batch: int | None = None
    packed: bool = False
    max_row_tokens: int = 0
    quadratic_tokens: float = 3072.0
    forward_tokens: float = float("inf")
    form: RowForm | None = None
    least_shared_tokens: int = 0
    pair_tokens: float = 0.0


def forward_plan(
    sequences: int,
    longest_tokens: int,
    hidden_size: int,
    packed: bool,
    *,
    ranks: int,
    max_tokens_per_micro_batch: int | None = None,
    keeps_small: bool = False,
    long_rows_are_free: bool = False,
) -> PlanSettings:
    """Return settings for forwards of `sequences` sequences of at most `longest_tokens`, bounded by `forward_bound`.

    long_rows_are_free: the cost of attention depends on document lengths alone, so a forward is one row.
    """
    given = max_tokens_per_micro_batch
    budget = forward_bound(given, sequences, longest_tokens, packed=packed, keeps_small=keeps_small)
    longest_row, quadratic, pair = longest_tokens, 6.0 * hidden_size, 0.0
    if packed and long_rows_are_free and budget is not None:
        longest_row, quadratic = max(longest_tokens, budget), float("inf")
        pair = 1.0 / (6.0 * hidden_size)
    return PlanSettings(
        ranks=ranks,
        max_tokens_per_micro_batch=budget,
        max_rows_per_micro_batch=sequences,
        packed=packed,
        max_row_tokens=longest_row,
        quadratic_tokens=quadratic,
        pair_tokens=pair,
    )


def forward_overhead_tokens(weights: int, on_gpu: bool) -> float:
    """Return the fixed cost of a forward and backward, in tokens of 6 x `weights` FLOPs: each weight is read twice, its
    gradient written, accumulated and, from ZeRO 2 on, reduced (at most about 60 bytes per weight), and kernels are
    launched from Python (20 ms for some hundred layers).

    The rates are those of a laptop's cores (2e11 FLOP/s, 2e10 byte/s) and of an H100 (5e14, 3e12), precise enough to
    choose between two or three forwards. 25 million weights on a CPU: 100 + 27 tokens.
    """
    flops, bytes_per_second = (5e14, 3e12) if on_gpu else (2e11, 2e10)
    return 60.0 / 6.0 * flops / bytes_per_second + 0.02 * flops / (6.0 * max(1, weights))


class DocumentSize(NamedTuple):
    """pairs: of tokens of which one sees the other, itself included."""

    tokens: int
    pairs: int


def plain_size(tokens: int) -> DocumentSize:
    """Return the size of a document in which each token sees all before it."""
    return DocumentSize(tokens, tokens * (tokens + 1) // 2)


@dataclass(frozen=True)
class _Documents:
    """The documents of a step, by index. heights: rows of `lengths` tokens that each takes. weights: by which they are
    dealt."""

    lengths: Sequence[int]
    heights: Sequence[int]
    weights: Sequence[int]


def plan_step(
    lengths: Sequence[int], settings: PlanSettings, heights: Sequence[int] = (), pairs: Sequence[int] = ()
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Lay out the documents of one optimizer step (`lengths` in tokens), each exactly once. [rank][m] of the result:
    the rows that `rank` computes in its m-th forward; a micro-batch may be empty.

    Ranks get nearly equal tokens, or where that takes less time, nearly equal costs: of tokens and of attention, which
    long documents have more of.

    heights: without packing, the rows of `lengths` tokens that each document takes, which stay together; () is one.
    pairs: `DocumentSize.pairs` of each document; () is those of plain ones."""
    heights = heights or [1] * len(lengths)
    totals = [length * height for length, height in zip(lengths, heights, strict=True)]
    step = _planned(_Documents(lengths, heights, lengths if settings.packed else totals), settings)
    if settings.ranks == 1 or (settings.packed and not settings.pair_tokens):  # wide rows cost what they hold
        return step
    pairs = pairs or [plain_size(length).pairs for length in lengths]
    cost = partial(_rows_cost, lengths, pairs, settings)
    costs = [round(cost(((index,),) * height)) for index, height in enumerate(heights)]
    before = _step_costs(step, cost)
    if max(before) * (1.0 - _LEAST_GAIN) * settings.ranks < sum(costs):
        return step
    least = before
    for other in (step, _planned(_Documents(lengths, heights, costs), settings)):
        aligned = tuple(tuple(sorted(rank, key=cost, reverse=True)) for rank in other)
        after = _step_costs(aligned, cost)
        gains = [old * (1.0 - _LEAST_GAIN) > new for old, new in zip(before, after, strict=True)]
        if any(gains) and all(new <= old for old, new in zip(least, after, strict=True)):
            step, least = aligned, after
    return step


def _planned(documents: _Documents, settings: PlanSettings) -> tuple[tuple[MicroBatch, ...], ...]:
    """Return a step whose ranks have nearly equal weights."""
    shares = dealt(documents.weights, settings.ranks, equal_counts=not settings.packed)
    fitted = [_fitted_micro_batches(documents, share, settings) for share in shares]
    most = max(len(micro_batches) for micro_batches in fitted)
    micro_batches = []
    for share, mine in zip(shares, fitted, strict=True):
        if len(mine) < most:  # spread this rank's share over as many forwards as the busiest rank needs
            spread = _laid_out(documents, share, most, settings)
            mine = spread if all(_fits(documents, rows, settings) for rows in spread) else mine
        micro_batches.append(tuple(mine) + ((),) * (most - len(mine)))
    return tuple(micro_batches)


def balanced(lengths: Sequence[int], documents: Sequence[int] | range, bins: int) -> list[list[int]]:
    """Deal `documents` into `bins` of nearly equal tokens: longest first, each to the emptiest bin (Graham 1969: the
    fullest is at most 4/3 of the optimum). Ties go to the bin with fewer documents, then to the first."""
    heap = [(0, 0, index) for index in range(bins)]
    dealt: list[list[int]] = [[] for _ in range(bins)]
    for document in sorted(documents, key=lambda index: (-lengths[index], index)):
        tokens, count, index = heapq.heappop(heap)
        dealt[index].append(document)
        heapq.heappush(heap, (tokens + lengths[document], count + 1, index))
    return dealt


def _fitted_micro_batches(documents: _Documents, share: Sequence[int], settings: PlanSettings) -> list[MicroBatch]:
    """Return the fewest micro-batches that keep every limit, or a few more if they pad less."""
    lengths = documents.lengths
    if not share:
        return []
    if not settings.packed:
        filled = _filled(documents, share, settings)
        even = _laid_out(documents, share, len(filled), settings)
        return even if all(_fits(documents, rows, settings) for rows in even) else filled
    fewest, budget = 1, settings.max_tokens_per_micro_batch
    if budget is not None:  # a document above the budget takes one micro-batch of any length
        fewest = max(fewest, -(-sum(min(lengths[index], budget) for index in share) // budget))
    for count in range(fewest, len(share) + 1):
        micro_batches = _laid_out(documents, share, count, settings)
        if all(_fits(documents, rows, settings) for rows in micro_batches):
            break
    # A few more may pad less. With many, widths are similar already.
    if count <= _MANY:
        for more in range(count + 1, min(len(share), count + _MANY) + 1):
            other = _laid_out(documents, share, more, settings)
            if more * settings.forward_tokens >= _cost(lengths, micro_batches, settings):
                break
            if _cost(lengths, other, settings) < _cost(lengths, micro_batches, settings):
                micro_batches = other
    return micro_batches


def _cost(lengths: Sequence[int], micro_batches: Sequence[MicroBatch], settings: PlanSettings) -> float:
    """Return the cost of padding, attention and forwards, in tokens."""
    cost = 0.0
    for rows in micro_batches:
        width = _width(lengths, rows)
        cost += len(rows) * width * (1.0 + width / settings.quadratic_tokens)
    return cost + (len(micro_batches) * settings.forward_tokens if len(micro_batches) > 1 else 0.0)


def _rows_cost(lengths: Sequence[int], pairs: Sequence[int], settings: PlanSettings, rows: MicroBatch) -> float:
    """Return the cost of a micro-batch on its rank, in tokens."""
    if not rows:
        return 0.0
    width = _width(lengths, rows)
    attended = sum(pairs[index] for row in rows for index in row)
    return len(rows) * width * (1.0 + width / settings.quadratic_tokens) + settings.pair_tokens * attended


def _step_costs(step: Sequence[Sequence[MicroBatch]], cost: Callable[[MicroBatch], float]) -> tuple[float, float]:
    """Return the cost of a step whose ranks wait for each other in each forward, as ZeRO-3 gathers weights, and of one
    whose ranks meet at its end."""
    costs = [[cost(rows) for rows in rank] for rank in step]
    return sum(map(max, zip(*costs, strict=True))), max(map(sum, costs))


def _filled(documents: _Documents, share: Sequence[int], settings: PlanSettings) -> list[MicroBatch]:
    """Return one document per row, longest first, each micro-batch filled before the next."""
    filled: list[MicroBatch] = []
    for document in sorted(share, key=lambda index: (-documents.lengths[index], index)):
        if filled and _fits(documents, (*filled[-1], (document,)), settings):
            filled[-1] = (*filled[-1], (document,))
        else:
            filled.append(((document,),))
    return filled


def _laid_out(documents: _Documents, share: Sequence[int], count: int, settings: PlanSettings) -> list[MicroBatch]:
    """Return `share` in at most `count` micro-batches, none empty."""
    lengths = documents.lengths
    if settings.packed:
        dealings = [balanced(lengths, share, count)]
        if documents.weights is not lengths:
            dealings.insert(0, balanced(documents.weights, share, count))
        if 1 < count <= 2 * _MANY:
            dealings.append(_by_length(lengths, share, count))
        plans = [[_packed(lengths, each, settings) for each in dealing if each] for dealing in dealings]
        fitting = [plan for plan in plans if all(_fits(documents, rows, settings) for rows in plan)]
        return min(fitting or plans[:1], key=lambda plan: _cost(lengths, plan, settings))
    # One document per row: neighbours in length share a micro-batch, so that there is little padding.
    longest_first = sorted(share, key=lambda index: (-lengths[index], index))
    slices = np.array_split(np.array(longest_first, dtype=np.int64), count)
    return [tuple((index,) for index in each.tolist()) for each in slices if len(each)]


def _by_length(lengths: Sequence[int], share: Sequence[int], count: int) -> list[list[int]]:
    """Cut `share` into `count` groups of neighbours in length, about equal in tokens."""
    total = sum(lengths[index] for index in share)
    dealt: list[list[int]] = [[]]
    before = 0
    for index in sorted(share, key=lambda index: (-lengths[index], index)):
        if dealt[-1] and before + lengths[index] / 2 > total * len(dealt) / count:
            dealt.append([])
        dealt[-1].append(index)
        before += lengths[index]
    return dealt


def _fits(documents: _Documents, rows: MicroBatch, settings: PlanSettings) -> bool:
    if sum(len(row) for row in rows) == 1:  # alone it has to run
        return True
    count, most_rows = len(rows), settings.max_rows_per_micro_batch
    if not settings.packed:
        count = sum(documents.heights[row[0]] for row in rows)
        if most_rows is not None and count > most_rows:
            return False
    budget = settings.max_tokens_per_micro_batch
    return budget is None or count * _width(documents.lengths, rows) <= budget


def _width(lengths: Sequence[int], rows: Sequence[Sequence[int]]) -> int:
    return max(sum(lengths[index] for index in row) for row in rows)


def _packed(lengths: Sequence[int], documents: Sequence[int], settings: PlanSettings) -> MicroBatch:
    """Pack documents into rows of nearly equal width: of all numbers of rows that are narrow enough, the one with the
    least cost of padding and attention."""
    total = sum(lengths[index] for index in documents)
    longest = max(lengths[index] for index in documents)
    widest = max(settings.max_row_tokens, longest)
    best: MicroBatch = ()
    least = float("inf")
    for count in range(-(-total // widest), len(documents) + 1):
        narrowest = max(longest, -(-total // count))  # no packing is narrower
        if count * narrowest * (1.0 + narrowest / settings.quadratic_tokens) >= least:
            if narrowest == longest:
                break
            continue
        rows = tuple(tuple(row) for row in balanced(lengths, documents, count) if row)
        width = _width(lengths, rows)
        cost = _cost(lengths, [rows], settings)
        if width <= widest and cost < least:  # always so for one document per row
            best, least = rows, cost
        if width == longest:  # more rows would only pad more
            break
    return best
