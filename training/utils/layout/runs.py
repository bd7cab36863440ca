"""Rows cut into runs: the pieces in which attention can be computed without a mask of the whole row.

A run is one or more neighbouring segments that are causal among themselves, and sees some earlier tokens whole. A
plain document is one run. A prompt with K responses is K runs: the prompt and the first response, and each further
response, which sees the prompt.
Knows no model and no loss.

N rows, T tokens in a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from training.utils.layout.rows import PAD_SEGMENT, TokenRows


@dataclass(frozen=True)
class Piece:
    """Tokens [start, end) of run number `run`, counted from its first."""

    run: int
    start: int
    end: int


@dataclass(frozen=True)
class Run:
    """tokens: its length. sees: earlier pieces that all of it sees, in the row's order. Padding sees nothing and
    nobody sees it."""

    tokens: int
    sees: tuple[Piece, ...]
    is_padding: bool


def runs_of(rows: TokenRows) -> tuple[Run, ...] | None:
    """Return the runs of all rows in the order of the flattened [N * T] tokens, which they cover; None where every
    row is one document, so that causal attention alone is right."""
    if rows.visible_NSS is None:
        return None
    runs: list[Run] = []
    visible = rows.visible_NSS.tolist()
    for n, segments in enumerate(_segments(rows.segment_ids_NT)):
        runs += _runs_of_row(segments, visible[n], len(runs))
    return tuple(runs)


def _segments(segment_ids_NT: torch.Tensor) -> list[list[tuple[int, int]]]:
    """For each row its segments as (number, tokens)."""
    rows = []
    for ids_T in segment_ids_NT:
        changes = (torch.nonzero(ids_T[1:] != ids_T[:-1]).flatten() + 1).tolist()
        bounds = [0, *changes, ids_T.numel()]
        rows.append([(int(ids_T[start]), end - start) for start, end in pairwise(bounds)])
    return rows


def _runs_of_row(segments: list[tuple[int, int]], visible: list[list[bool]], first: int) -> list[Run]:
    """first: the number of the row's first run among all."""
    runs: list[Run] = []
    place: dict[int, Piece] = {}  # of each segment of the row so far
    seen_by_run: set[int] = set()  # the segments that the run being built sees or holds
    for segment, tokens in segments:
        is_padding = segment == PAD_SEGMENT
        seen = [] if is_padding else [other for other in place if visible[segment][other]]
        if seen and set(seen) == seen_by_run:
            start = runs[-1].tokens
            runs[-1] = Run(start + tokens, runs[-1].sees, False)
        else:
            start = 0
            runs.append(Run(tokens, _joined([place[other] for other in seen]), is_padding))
            seen_by_run = set(seen)
        if not is_padding:
            place[segment] = Piece(first + len(runs) - 1, start, start + tokens)
            seen_by_run.add(segment)
    return runs


def _joined(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Neighbouring pieces of one run as one."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].run == piece.run and joined[-1].end == piece.start:
            joined[-1] = Piece(piece.run, joined[-1].start, piece.end)
        else:
            joined.append(piece)
    return tuple(joined)
