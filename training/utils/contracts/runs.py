"""Rows cut into runs, for which attention needs no mask of the whole row.

A run is one or more neighbouring segments with causal attention among themselves, and sees some earlier tokens whole. A
plain document is one run. A prompt with K responses is K runs: the prompt with the first response, and each further
response, which sees the prompt.

N rows, T tokens in a row, S segments of a row (padding is the last).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

PAD_SEGMENT = -1  # the segment of padding


@dataclass(frozen=True)
class RunSpan:
    """Tokens [start, end) of run number `run`, counted from its first."""

    run: int
    start: int
    end: int


@dataclass(frozen=True)
class AttentionRun:
    """tokens: its length. sees: earlier spans that all of it sees, in order. Padding sees nothing and is not seen."""

    tokens: int
    sees: tuple[RunSpan, ...]
    is_padding: bool


@dataclass(frozen=True)
class RunLengths:
    """Runs as attention of variable lengths takes them: queries are the flattened [N * T] tokens, and the keys of each
    run are the tokens that it sees and then its own, so that its queries stand at the end of its keys.

    begins: int32 [runs + 1], where the queries of each run begin, and the end.
    key_begins: int32 [runs + 1], the same of its keys.
    key_tokens: int64, which token each key is; None where no run sees another: then keys are the tokens as they stand.
    longest, longest_keys: of a run, in tokens.
    """

    begins: torch.Tensor
    key_begins: torch.Tensor
    key_tokens: torch.Tensor | None
    longest: int
    longest_keys: int

    def to(self, device: torch.device | str) -> RunLengths:
        tokens = None if self.key_tokens is None else self.key_tokens.to(device)
        return RunLengths(self.begins.to(device), self.key_begins.to(device), tokens, self.longest, self.longest_keys)


def runs_of(segment_ids_NT: torch.Tensor, visible_NSS: torch.Tensor) -> tuple[AttentionRun, ...]:
    """Return the runs of `TokenRows` with these fields: they cover the flattened [N * T] tokens in order."""
    runs: list[AttentionRun] = []
    seen: list[list[list[int]]] = [[[] for _ in row] for row in visible_NSS]
    for row, segment, other in visible_NSS.tril(-1).nonzero().tolist():
        seen[row][segment].append(other)
    for ids_T, seen_S in zip(segment_ids_NT, seen, strict=True):
        runs += _runs_of_row(ids_T, seen_S, len(runs))
    return tuple(runs)


def lengths_of(runs: Sequence[AttentionRun]) -> RunLengths:
    """Return the lengths of runs that cover all rows. Padding is a run that sees itself."""
    queries, seen = [run.tokens for run in runs], [sum(span.end - span.start for span in run.sees) for run in runs]
    starts = [0, *accumulate(queries)]
    keys = [own + others for own, others in zip(queries, seen, strict=True)]
    key_tokens = None
    if any(seen):
        parts = []
        for start, run in zip(starts, runs, strict=False):
            parts += [torch.arange(starts[span.run] + span.start, starts[span.run] + span.end) for span in run.sees]
            parts.append(torch.arange(start, start + run.tokens))
        key_tokens = torch.cat(parts)
    return RunLengths(
        begins=torch.tensor(starts, dtype=torch.int32),
        key_begins=torch.tensor([0, *accumulate(keys)], dtype=torch.int32),
        key_tokens=key_tokens,
        longest=max(queries),
        longest_keys=max(keys),
    )


def _runs_of_row(ids_T: torch.Tensor, seen_S: list[list[int]], first: int) -> list[AttentionRun]:
    """seen_S: of each segment the earlier ones that it sees. first: the number of the row's first run among all."""
    numbers, lengths = torch.unique_consecutive(ids_T, return_counts=True)
    runs: list[AttentionRun] = []
    place: dict[int, RunSpan] = {}  # of each segment of the row so far
    seen_by_run: set[int] = set()  # the segments that the run being built sees or holds
    for segment, tokens in zip(numbers.tolist(), lengths.tolist(), strict=True):
        is_padding = segment == PAD_SEGMENT
        seen = [] if is_padding else seen_S[segment]
        if seen and set(seen) == seen_by_run:
            start = runs[-1].tokens
            runs[-1] = AttentionRun(start + tokens, runs[-1].sees, False)
        else:
            start = 0
            runs.append(AttentionRun(tokens, _joined([place[other] for other in seen]), is_padding))
            seen_by_run = set(seen)
        if not is_padding:
            place[segment] = RunSpan(first + len(runs) - 1, start, start + tokens)
            seen_by_run.add(segment)
    return runs


def _joined(spans: list[RunSpan]) -> tuple[RunSpan, ...]:
    """Join neighbouring spans of one run."""
    joined: list[RunSpan] = []
    for span in spans:
        if joined and (joined[-1].run, joined[-1].end) == (span.run, span.start):
            span = RunSpan(span.run, joined.pop().start, span.end)
        joined.append(span)
    return tuple(joined)
