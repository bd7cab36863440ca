"""Rows cut into runs, for which attention needs no mask of the whole row.

A run is one or more neighbouring segments with causal attention among themselves, and sees some earlier tokens whole. A
plain document is one run. A prompt with K responses is K runs: the prompt with the first response, and each further
response, which sees the prompt.

N rows, T tokens in a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from training.utils.layout.rows import PAD_SEGMENT, TokenRows


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


def runs_of(rows: TokenRows) -> tuple[AttentionRun, ...] | None:
    """Return the runs of all rows, which cover the flattened [N * T] tokens in order; None if every row is one
    document, for which causal attention is enough."""
    if rows.visible_NSS is None:
        return None
    runs: list[AttentionRun] = []
    for ids_T, visible in zip(rows.segment_ids_NT, rows.visible_NSS.tolist(), strict=True):
        runs += _runs_of_row(ids_T, visible, len(runs))
    return tuple(runs)


def _runs_of_row(ids_T: torch.Tensor, visible: list[list[bool]], first: int) -> list[AttentionRun]:
    """first: the number of the row's first run among all."""
    numbers, lengths = torch.unique_consecutive(ids_T, return_counts=True)
    runs: list[AttentionRun] = []
    place: dict[int, RunSpan] = {}  # of each segment of the row so far
    seen_by_run: set[int] = set()  # the segments that the run being built sees or holds
    for segment, tokens in zip(numbers.tolist(), lengths.tolist(), strict=True):
        is_padding = segment == PAD_SEGMENT
        seen = [] if is_padding else [other for other in place if visible[segment][other]]
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
