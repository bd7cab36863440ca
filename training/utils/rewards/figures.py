"""Figures of scored samples: by prompt, by data source, by value, with 95 % confidence intervals; and of several
samples of each prompt, the scores of one, the best, the worst or the majority of k. Serves evaluations.

A sample is a mapping: `prompt_index`, `response`, `last_turn` of a conversation, the prompt's `columns`, and values by
name: `reward`, `reward/NAME` of each summand, `reward/NAME/KEY` of what it also returns, `check` and `check/KEY`.

A figure of k samples is the exact expectation over the k-subsets of a prompt's n responses, drawn without replacement:
nothing is resampled. N prompts or rows, n responses to each."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_RESAMPLES = 2000
_RESAMPLED_NUMBERS = 2_000_000  # at a time


@dataclass(frozen=True)
class Figure:
    """A value and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} (95 % from {self.low:.3f} to {self.high:.3f})"


def mean(values: Sequence[float], seed: int) -> Figure:
    """The mean with the bootstrap's percentile interval (Efron and Tibshirani 1993, section 13.3). For differences on
    the same prompts, this is the paired bootstrap."""
    return ratio(values, [1.0] * len(values), seed)


def resamples(count: int, seed: int) -> Iterator[np.ndarray]:
    """Yield the places of rows that are drawn with replacement: some resamples [R, N] at a time, 2,000 in all."""
    draws, at_once = np.random.default_rng(seed), max(1, _RESAMPLED_NUMBERS // count)
    for first in range(0, _RESAMPLES, at_once):
        yield draws.integers(0, count, (min(at_once, _RESAMPLES - first), count))


def ratio(tops: Sequence[float], bottoms: Sequence[float], seed: int) -> Figure:
    """sum(tops) / sum(bottoms), with the same interval over the N pairs: a mean over tokens, resampled by rows."""
    top_N, bottom_N = np.asarray(tops, np.float64), np.asarray(bottoms, np.float64)
    ratios = [top_N[places].sum(axis=1) / bottom_N[places].sum(axis=1) for places in resamples(len(top_N), seed)]
    low, high = np.percentile(np.concatenate(ratios), [2.5, 97.5])
    return Figure(float(top_N.sum() / bottom_N.sum()), float(low), float(high))


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


Sample = Mapping[str, Any]


def value_names(samples: Sequence[Sample]) -> list[str]:
    """Return the names of the values that any sample has, besides `reward`."""
    names = dict.fromkeys(name for sample in samples for name in sample)
    return [name for name in names if name == "check" or name.startswith(("check/", "reward/"))]


def each_prompt(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples of each prompt, prompts in the order of their first."""
    by_prompt: dict[int, list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample["prompt_index"], []).append(sample)
    return list(by_prompt.values())


def of_each_prompt(samples: Sequence[Sample], name: str) -> list[list[float]]:
    """Return a value of each prompt's samples."""
    return [[float(sample[name]) for sample in of_prompt] for of_prompt in each_prompt(samples)]


def by_source(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Return the samples of each data source by its name in metrics: the last part of a path, or all of it if two would
    be equal. Nothing where there is one source."""
    sources: dict[str, list[Sample]] = {}
    for sample in samples:
        sources.setdefault(str(sample["columns"].get("data_source", "")), []).append(sample)
    if len(sources) < 2:
        return {}
    short = [re.sub(r"[^\w.-]", "_", source.rsplit("/", 1)[-1]) for source in sources]
    whole = [re.sub(r"[^\w.-]", "_", source) for source in sources]
    return dict(zip(short if len(set(short)) == len(short) else whole, sources.values(), strict=True))


def several_of(samples: Sequence[Sample], name: str, seed: int) -> dict[str, Figure]:
    """Return `several_figures` of a value, of the prompts whose samples all have it; nothing with one sample a prompt.
    A majority is of responses that are equal but for white space, or of equal numbers where the value's function also
    gives one named `answer`."""
    having = [sample for sample in samples if name in sample]
    values = of_each_prompt(having, name)
    most = max(map(len, values), default=0)
    if most < 2:
        return {}
    given = _answer_name(having, name)

    def answer(sample: Sample) -> Hashable:  # a response's text; of a conversation its last turn
        text = " ".join(str(sample.get("last_turn", sample["response"])).split())
        return sample.get(given, text)

    answers = [[answer(sample) for sample in of_prompt] for of_prompt in each_prompt(having)]
    whole = [place for place, each in enumerate(values) if len(each) == most]
    return several_figures([values[place] for place in whole], [answers[place] for place in whole], seed)


def _answer_name(samples: Sequence[Sample], name: str) -> str:
    """Return the name of the value by which samples vote. The weighted sum's is that of the only reward that has one,
    or else the checker's."""
    if name.startswith("reward/"):
        return f"reward/{name.split('/')[1]}/answer"
    answers = [other for other in value_names(samples) if re.fullmatch(r"reward/[^/]+/answer", other)]
    return answers[0] if name == "reward" and len(answers) == 1 else "check/answer"
