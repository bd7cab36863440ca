"""Division of rows among the phases: pure functions of numbers, random only by the seed.

Nothing here knows of ranks, files or texts, so the result is the same on every machine and at any world size. The
generator is numpy's legacy RandomState, whose stream numpy promises never to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import PHASES

# Streams for different permutations: rows held out for evaluation, rows divided between phases, rows picked.
_CARVE, _SHARE, _PICK = 1, 2, 3


def parse_data_split(data_split: str) -> tuple[Fraction, Fraction, Fraction]:
    """Read "2,4,4": the weights of phases 1, 2, 3. Decimals are allowed; at least one is above 0."""
    parts = [part.strip() for part in str(data_split).strip().strip("[]").split(",")]
    try:
        weights = tuple(Fraction(part) for part in parts)
    except (ValueError, ZeroDivisionError):
        weights = ()
    if len(parts) != 3 or len(weights) != 3 or min(weights) < 0:
        raise ThreestepError(
            "--data_split expects three numbers of 0 or more, the shares of phases 1, 2 and 3, such as 2,4,4; got "
            f"'{data_split}'"
        )
    if sum(weights) == 0:
        raise ThreestepError(
            f"--data_split expects at least one share above 0, got '{data_split}', which gives no phase any row"
        )
    return weights  # type: ignore[return-value]


def share_rows(rows: int, weights: Sequence[Fraction | int]) -> list[int]:
    """Divide `rows` by weight with the largest remainder: the counts add up and a weight of 0 gets nothing.

    Worked example, 10 rows by weights 1, 1, 1: quotas 3 1/3 each, floors 3, 3, 3; the remaining row goes to the
    largest remainder, the first of equals: 4, 3, 3.
    """
    total = sum(weights)
    if rows == 0 or total == 0:
        return [0] * len(weights)
    quotas = [Fraction(rows) * weight / total for weight in weights]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda index: (counts[index] - quotas[index], index))
    for index in by_remainder[: rows - sum(counts)]:
        counts[index] += 1
    return counts


def split_indices(
    rows: int, data_split: str, seed: int, phase: int, *, phases_of_rows: Sequence[tuple[int, ...]] | None = None
) -> np.ndarray:
    """The rows, out of 0 .. rows - 1, that one phase trains on: int64, ascending.

    The results for phases 1, 2, 3 are disjoint and cover every row. `phases_of_rows`: the phases that each row may
    serve (None: all). Rows that may serve the same phases are divided between those by the same weights; a row whose
    phases all have weight 0 is left out.
    """
    weights = parse_data_split(data_split)
    if phases_of_rows is None:
        groups: dict[tuple[int, ...], np.ndarray] = {PHASES: np.arange(rows)}
    else:
        members: dict[tuple[int, ...], list[int]] = {}
        for row, phases in enumerate(phases_of_rows):
            members.setdefault(tuple(sorted(set(phases))), []).append(row)
        groups = {phases: np.array(indices, dtype=np.int64) for phases, indices in sorted(members.items())}
    taken = [np.zeros(0, dtype=np.int64)]
    for phases, indices in groups.items():
        allowed = [weight if p in phases else Fraction(0) for p, weight in zip(PHASES, weights, strict=True)]
        bounds = np.cumsum([0, *share_rows(len(indices), allowed)])
        shuffled = indices[shuffled_order(len(indices), seed, _SHARE)]
        taken.append(shuffled[bounds[phase - 1] : bounds[phase]])
    return np.sort(np.concatenate(taken)).astype(np.int64)


def carve_eval(rows: int, eval_fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Hold rows out for evaluation: (training rows, evaluation rows), int64, ascending, disjoint, covering."""
    count = round(rows * eval_fraction)
    if eval_fraction > 0 and rows >= 2:
        count = min(max(count, 1), rows - 1)  # at least one of each
    shuffled = shuffled_order(rows, seed, _CARVE)
    return np.sort(shuffled[count:]), np.sort(shuffled[:count])


def pick_rows(indices: Sequence[np.ndarray], most: int | None, seed: int) -> list[np.ndarray]:
    """At most `most` rows of several sources, ascending, each keeping its share; by the seed."""
    total = sum(len(rows) for rows in indices)
    if most is None or total <= most:
        return list(indices)
    counts = share_rows(most, [len(rows) for rows in indices])
    return [
        np.sort(rows[shuffled_order(len(rows), seed, _PICK)[:count]])
        for rows, count in zip(indices, counts, strict=True)
    ]


def shuffled_order(rows: int, seed: int, stream: int = _PICK) -> np.ndarray:
    """A permutation of 0 .. rows - 1 decided by the seed; another for each `stream`."""
    return np.random.RandomState([seed % 2**32, stream]).permutation(rows).astype(np.int64)
