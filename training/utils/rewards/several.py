"""Figures of several scored responses to each prompt: scores of one, the best, the worst or the majority of k.
Serves evaluations.

Each is the exact expectation over the k-subsets of a prompt's n responses, drawn without replacement: nothing is
resampled. N prompts, n responses to each.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

from training.utils.rewards.intervals import Figure, mean


def best_of(values: Sequence[float], k: int) -> float:
    """Return E[max of k of the n values]: the i-th smallest, i from 1, is the largest of C(i - 1, k - 1) of the C(n, k)
    subsets. Of values 0 and 1 this is pass@k without bias, 1 - C(n - c, k) / C(n, k) (Chen et al. 2021)."""
    subsets = math.comb(len(values), k)
    # Divided first: of a thousand values and more, the counts alone exceed a float.
    return sum(math.comb(below, k - 1) / subsets * value for below, value in enumerate(sorted(values)))


def worst_of(values: Sequence[float], k: int) -> float:
    """Return E[min of k of the n values]."""
    return -best_of([-value for value in values], k)


def majority_of(values: Sequence[float], answers: Sequence[Hashable], k: int) -> float:
    """Return the expected value of the answer that most of k responses give (self-consistency, Wang et al. 2022), the
    mean of those responses' values; answers with equally many votes count equally.

    Counts subsets instead of listing them: for each number of votes that wins, over the answers one after another, how
    many subsets give so many responses with so many winners, and the sum over these of the winners' means. A winner's
    mean over the subsets with so many of its responses is that of all of them.
    """
    counts = Counter(answers)
    means: defaultdict[Hashable, float] = defaultdict(float)
    for answer, value in zip(answers, values, strict=True):
        means[answer] += value / counts[answer]
    total = 0.0
    for votes in range(1, min(k, max(counts.values())) + 1):
        # (responses so far, winners) -> (subsets, sum of the winners' means over them)
        states: dict[tuple[int, int], tuple[int, float]] = {(0, 0): (1, 0.0)}
        for answer, count in counts.items():
            states = _with_answer(states, count, means[answer], votes, k=k)
        total += sum(of / winners for (taken, winners), (_, of) in states.items() if taken == k and winners)
    return total / math.comb(len(values), k)


def _with_answer(
    states: dict[tuple[int, int], tuple[int, float]], count: int, mean: float, votes: int, *, k: int
) -> dict[tuple[int, int], tuple[int, float]]:
    """Return the states once up to `votes` of an answer's `count` responses are taken; with so many it wins."""
    after: dict[tuple[int, int], tuple[int, float]] = {}
    for (taken, winners), (subsets, of) in states.items():
        for more in range(min(count, votes, k - taken) + 1):
            wins = more == votes
            ways = math.comb(count, more)
            place = taken + more, winners + wins
            others, so_far = after.get(place, (0, 0.0))
            after[place] = others + ways * subsets, so_far + ways * (of + subsets * mean * wins)
    return after


def sizes(n: int) -> list[int]:
    """Return 2, 4, 8, ... below n, and n; nothing where n is 1."""
    powers = [2**power for power in range(1, n.bit_length()) if 2**power < n]
    return [*powers, n] if n > 1 else []


def several_figures(
    values_Nn: Sequence[Sequence[float]], answers_Nn: Sequence[Sequence[Hashable]], seed: int
) -> dict[str, Figure]:
    """Return means over prompts, with the 95 % intervals of a bootstrap over prompts: mean@n; std@n, the deviation of a
    prompt's values; best@k (which is pass@k where all values are 0 or 1), worst@k and majority@k for the sizes k."""
    n = len(values_Nn[0])
    by_k = {f"mean@{n}": [sum(values) / n for values in values_Nn], f"std@{n}": [_std(values) for values in values_Nn]}
    for k in sizes(n):
        by_k[f"best@{k}"] = [best_of(values, k) for values in values_Nn]
        by_k[f"worst@{k}"] = [worst_of(values, k) for values in values_Nn]
        by_k[f"majority@{k}"] = [
            majority_of(values, answers, k) for values, answers in zip(values_Nn, answers_Nn, strict=True)
        ]
    return {name: mean(numbers, seed) for name, numbers in by_k.items()}


def _std(values: Sequence[float]) -> float:
    average = sum(values) / len(values)
    return math.sqrt(sum((value - average) ** 2 for value in values) / len(values))
