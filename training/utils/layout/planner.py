"""Which sequences of an optimizer step go to which rank and micro-batch.

Users think in sequences per optimizer step; that number is kept exactly. A plan is a pure function of the
lengths and the settings, so every rank works out the same plan without talking to another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class PlanSettings:
    """ranks: data-parallel ranks. sequences_per_micro_batch: the most sequences in one forward of one rank.
    max_tokens_per_micro_batch: the most tokens, padding included, in one forward; None sets no bound."""

    ranks: int
    sequences_per_micro_batch: int
    max_tokens_per_micro_batch: int | None = None


@dataclass(frozen=True)
class StepPlan:
    """micro_batches[rank][m] holds the indices of the sequences that `rank` computes in its m-th forward.

    Every rank has the same number of micro-batches; some may be empty.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def micro_batches_per_rank(self) -> int:
        return len(self.micro_batches[0])


def plan_step(lengths: Sequence[int], settings: PlanSettings) -> StepPlan:
    """Deal the sequences of one optimizer step (`lengths` in tokens) over ranks and micro-batches.

    Longest first, rank by rank and back again (a snake), so that neighbours in length share a micro-batch: little
    padding, and ranks that finish together. Each sequence appears exactly once.
    """
    longest_first = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    micro_batches: list[list[tuple[int, ...]]] = [[] for _ in range(settings.ranks)]
    start = 0
    while start < len(longest_first):
        longest = int(lengths[longest_first[start]])
        per_rank = _sequences_that_fit(longest, settings)
        chunk = longest_first[start : start + per_rank * settings.ranks]
        for rank in range(settings.ranks):
            micro_batches[rank].append(tuple(int(index) for index in _dealt_to(rank, chunk, settings.ranks)))
        start += len(chunk)
    return StepPlan(tuple(tuple(batches) for batches in micro_batches))


def _sequences_that_fit(longest_tokens: int, settings: PlanSettings) -> int:
    if settings.max_tokens_per_micro_batch is None:
        return settings.sequences_per_micro_batch
    # A single sequence above the budget still runs, alone: splitting it would change the mathematics.
    fitting = settings.max_tokens_per_micro_batch // max(1, longest_tokens)
    return max(1, min(settings.sequences_per_micro_batch, fitting))


def _dealt_to(rank: int, chunk: np.ndarray, ranks: int) -> list[int]:
    """The sequences of a snake deal: ranks 0..R-1, then R-1..0, and so on."""
    dealt = []
    for turn in range(0, len(chunk), ranks):
        seat = rank if (turn // ranks) % 2 == 0 else ranks - 1 - rank
        if turn + seat < len(chunk):
            dealt.append(chunk[turn + seat])
    return dealt
