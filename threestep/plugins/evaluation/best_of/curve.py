"""Figures of the best of k responses for k up to n: its expected reward and, of a checker, the score of the response
that the reward picks. Sources: `utils.rewards.figures`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.utils.rewards.figures import Figure, best_of, mean, sizes

REWARD, CHECK = "reward", "check"


@dataclass(frozen=True)
class CurvePoint:
    """Means over prompts, of the best of k.

    kl: its divergence from the model, in nats, at most. reward: of the response with the highest. check: the checker's
    score of that response. best_check: of the response that the checker would pick; both None without a checker.
    """

    k: int
    kl: float
    reward: Figure
    check: Figure | None = None
    best_check: Figure | None = None


def curve_of(drawn: Sequence[Mapping[str, Any]], seed: int) -> list[CurvePoint]:
    """Return the points for 1, 2, 4, ... and n. Each is unbiased: the exact mean over the k-subsets of a prompt's n
    responses; intervals are over prompts."""
    checked = CHECK in drawn[0]
    return [
        CurvePoint(
            k,
            divergence_of_best(k),
            mean([best_of(prompt[REWARD], k) for prompt in drawn], seed),
            mean(_picked(drawn, k), seed) if checked else None,
            mean([best_of(prompt[CHECK], k) for prompt in drawn], seed) if checked else None,
        )
        for k in [1, *sizes(len(drawn[0][REWARD]))]
    ]


def over_optimised(drawn: Sequence[Mapping[str, Any]], curve: Sequence[CurvePoint], seed: int) -> str:
    """A sentence if the checker falls from its highest point to the largest k, by an interval over the same prompts;
    else ""."""
    known = [(point.check.value, point.k) for point in curve if point.check is not None]
    if not known:
        return ""
    (_, top), last = max(known, key=lambda pair: (pair[0], -pair[1])), curve[-1].k
    pairs = zip(_picked(drawn, last), _picked(drawn, top), strict=True)
    change = mean([after - before for after, before in pairs], seed)
    if change.high >= 0:
        return ""
    return (
        f"over-optimized: the checker's score for the response that the reward picks changes by {change} from "
        f"n = {top} to n = {last}"
    )


def _picked(drawn: Sequence[Mapping[str, Any]], k: int) -> list[float]:
    return [picked_of(prompt[REWARD], prompt[CHECK], k) for prompt in drawn]


def picked_of(values: Sequence[float], others: Sequence[float], k: int) -> float:
    """Return the expected other value of the response that has the largest of k of the n values; equally large ones are
    picked equally often. Of a checker's values beside a reward's, it falls where the reward is over-optimised (Gao,
    Schulman and Hilton 2023)."""
    of_value: defaultdict[float, list[float]] = defaultdict(list)
    for value, other in zip(values, others, strict=True):
        of_value[value].append(other)
    # A pick has one of equal values as likely as another, whichever their order.
    means = [sum(of_value[value]) / len(of_value[value]) for value in sorted(values)]
    subsets = math.comb(len(values), k)
    return sum(math.comb(below, k - 1) / subsets * other for below, other in enumerate(means))


def divergence_of_best(k: int) -> float:
    """Return the KL divergence of the best of k from what drew them, log k - (k - 1) / k nats; equally good responses
    make it smaller (Stiennon et al. 2020, appendix G.3; Beirami et al. 2024)."""
    return math.log(k) - (k - 1) / k
