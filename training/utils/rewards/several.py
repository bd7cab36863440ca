"""Figures of several scored responses to each prompt: what one, the best, the worst or the majority of k would score.
Serves evaluations.

Each is the expectation over the k-subsets of a prompt's n responses, drawn without replacement: exact for the best and
the worst, so nothing is resampled; for the majority exact where there are few subsets, and over seeded ones where there
are many. N prompts, n responses to each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence

import numpy as np

from training.utils.rewards.intervals import Figure, mean

_MOST_SUBSETS = 1000  # of a prompt, for the majority


def best_of(values: Sequence[float], k: int) -> float:
    """Return E[max of k of the n values]: the i-th smallest, i from 1, is the largest of C(i - 1, k - 1) of the C(n, k)
    subsets. Of values 0 and 1 this is pass@k without bias, 1 - C(n - c, k) / C(n, k) (Chen et al. 2021)."""
    subsets = math.comb(len(values), k)
    return sum(math.comb(below, k - 1) * value for below, value in enumerate(sorted(values))) / subsets


def worst_of(values: Sequence[float], k: int) -> float:
    """Return E[min of k of the n values]."""
    return -best_of([-value for value in values], k)


def majority_of(values: Sequence[float], answers: Sequence[Hashable], k: int, seed: int) -> float:
    """Return the expected value of the answer that most of k responses give (self-consistency, Wang et al. 2022), the
    mean of those responses' values; answers with equally many votes count equally."""
    n = len(values)
    if math.comb(n, k) <= _MOST_SUBSETS:
        subsets = [list(subset) for subset in itertools.combinations(range(n), k)]
    else:
        draws = np.random.default_rng(seed)
        subsets = [draws.choice(n, k, replace=False).tolist() for _ in range(_MOST_SUBSETS)]
    return sum(_majority(subset, values, answers) for subset in subsets) / len(subsets)


def _majority(subset: Sequence[int], values: Sequence[float], answers: Sequence[Hashable]) -> float:
    by_answer: dict[Hashable, list[float]] = {}
    for index in subset:
        by_answer.setdefault(answers[index], []).append(values[index])
    most = max(map(len, by_answer.values()))
    winners = [sum(own) / len(own) for own in by_answer.values() if len(own) == most]
    return sum(winners) / len(winners)


def sizes(n: int) -> list[int]:
    """Return 2, 4, 8, ... below n, and n; nothing where n is 1."""
    powers = [2**power for power in range(1, n.bit_length()) if 2**power < n]
    return [*powers, n] if n > 1 else []


def several_figures(
    values_Nn: Sequence[Sequence[float]], answers_Nn: Sequence[Sequence[Hashable]], seed: int
) -> dict[str, Figure]:
    """Return means over prompts, with the 95 % intervals of a bootstrap over prompts: mean@n; std@n, the deviation of a
    prompt's values; best@k (pass@k where all values are 0 or 1), worst@k and majority@k for the sizes k."""
    n = len(values_Nn[0])
    found = {f"mean@{n}": [sum(values) / n for values in values_Nn], f"std@{n}": [_std(values) for values in values_Nn]}
    are_shares = all(value in (0.0, 1.0) for values in values_Nn for value in values)
    for k in sizes(n):
        best = [best_of(values, k) for values in values_Nn]
        found |= {f"pass@{k}": best} if are_shares else {f"best@{k}": best}
        found[f"worst@{k}"] = [worst_of(values, k) for values in values_Nn]
        found[f"majority@{k}"] = [
            majority_of(values, answers, k, seed + place)
            for place, (values, answers) in enumerate(zip(values_Nn, answers_Nn, strict=True))
        ]
    return {name: mean(numbers, seed) for name, numbers in found.items()}


def _std(values: Sequence[float]) -> float:
    average = sum(values) / len(values)
    return math.sqrt(sum((value - average) ** 2 for value in values) / len(values))
