"""The account of a reward: how far it and the held-out values have moved, what the score goes with, and the responses
whose score rose most while a held-out value fell. Plain numbers; knows no run and no page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from threestep.plugins.report.gaming.surface import Sample, features_of
from threestep.plugins.report.gaming.values import SCORE, Values

MOST_PAIRS = 10
# A linear model of fewer samples than this for each feature explains chance.
_SAMPLES_A_FEATURE = 10
# Standard errors from which on a change is no chance: 1 in 370 of normal ones is further out.
CLEAR = 3.0


@dataclass(frozen=True)
class Drift:
    """A value at two evaluations of the same prompts. deviation: standard deviation of all its samples. error: standard
    error of the gain, over prompts; infinite of one prompt."""

    name: str
    is_trained: bool
    before: float
    after: float
    deviation: float
    error: float

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def deviations(self) -> float:
        """The gain in standard deviations; 0 of a constant value."""
        return self.gain / self.deviation if self.deviation else 0.0

    @property
    def rose(self) -> bool:
        return self.gain > CLEAR * self.error

    @property
    def fell(self) -> bool:
        return -self.gain > CLEAR * self.error


@dataclass(frozen=True)
class FeatureAccount:
    """A feature at two evaluations: its mean, its correlation with the score (None where one of them is constant), and
    the share of the score's gain that the linear model gives it (None without a model)."""

    name: str
    means: tuple[float, float]
    correlations: tuple[float | None, float | None]
    share: float | None


class Pair(NamedTuple):
    """Two samples of one prompt, and the held-out values that fell."""

    before: Sample
    after: Sample
    fell: tuple[str, ...]


@dataclass(frozen=True)
class GamingAccount:
    """score: the first of `drifts`. explained: share of its gain that a linear model of the features explains, and
    r_squared of that model; None without one. pairs: those whose score rose most while a held-out value fell."""

    drifts: tuple[Drift, ...]
    features: tuple[FeatureAccount, ...]
    explained: float | None
    r_squared: float | None
    pairs: tuple[Pair, ...]

    @property
    def score(self) -> Drift:
        return self.drifts[0]

    @property
    def held_out(self) -> list[Drift]:
        return [drift for drift in self.drifts if not drift.is_trained]


def account_of(before: Sequence[Sample], after: Sequence[Sample], values: Values) -> GamingAccount | None:
    """Return the account of two evaluations; None if they have no scored sample in common."""
    matched = _matched(before, after)
    if not matched:
        return None
    named = [(SCORE, True), *((name, True) for name in values.trained), *((name, False) for name in values.held_out)]
    drifts = [drift for name, is_trained in named if (drift := _drift(matched, name, is_trained)) is not None]
    features, explained, r_squared = _features(matched, drifts[0])
    return GamingAccount(tuple(drifts), features, explained, r_squared, _pairs(matched, values.held_out))


def _number(sample: Sample, name: str) -> float | None:
    value = sample.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _matched(before: Sequence[Sample], after: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Samples of the same place of the same prompt that both have a score."""

    def by_place(samples: Sequence[Sample]) -> dict[tuple[Any, Any], Sample]:
        scored = (sample for sample in samples if _number(sample, SCORE) is not None)
        return {(sample.get("prompt_index"), sample.get("sample", 0)): sample for sample in scored}

    old, new = by_place(before), by_place(after)
    return [(old[place], new[place]) for place in old if place in new]


def _drift(matched: Sequence[tuple[Sample, Sample]], name: str, is_trained: bool) -> Drift | None:
    """The drift over samples that have the value at both evaluations; None without any."""
    both = [(old, _number(old, name), _number(new, name)) for old, new in matched]
    known = [(old.get("prompt_index"), was, now) for old, was, now in both if was is not None and now is not None]
    if not known:
        return None
    gains: dict[Any, list[float]] = {}
    for prompt, was, now in known:
        gains.setdefault(prompt, []).append(now - was)
    means = [statistics.fmean(of_prompt) for of_prompt in gains.values()]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.inf
    olds, news = [was for _, was, _ in known], [now for _, _, now in known]
    deviation = statistics.pstdev([*olds, *news])
    return Drift(name, is_trained, statistics.fmean(olds), statistics.fmean(news), deviation, error)


def _features(
    matched: Sequence[tuple[Sample, Sample]], score: Drift
) -> tuple[tuple[FeatureAccount, ...], float | None, float | None]:
    """The accounts of all features, the share of the gain that they explain together, and R squared.

    The model is one least-squares fit of score on features over the samples of both evaluations; a feature's share is
    its coefficient times the change of its mean (Oaxaca 1973 and Blinder 1973, with the pooled coefficients of
    Neumark 1988).
    """
    old, new = (features_of([pair[place] for pair in matched]) for place in (0, 1))
    scores = [[_number(pair[place], SCORE) or 0.0 for pair in matched] for place in (0, 1)]
    y = scores[0] + scores[1]
    columns = {name: old[name] + new[name] for name in old}
    varying = {name: column for name, column in columns.items() if min(column) < max(column)}
    coefficients, r_squared = None, None
    if (score.rose or score.fell) and varying and min(y) < max(y) and len(y) >= _SAMPLES_A_FEATURE * len(varying):
        coefficients, r_squared = _fit(varying, y)
    accounts = []
    for name in columns:
        means = (statistics.fmean(old[name]), statistics.fmean(new[name]))
        correlations = (_correlation(old[name], scores[0]), _correlation(new[name], scores[1]))
        share = None if coefficients is None else coefficients.get(name, 0.0) * (means[1] - means[0]) / score.gain
        accounts.append(FeatureAccount(name, means, correlations, share))
    explained = None if coefficients is None else sum(account.share or 0.0 for account in accounts)
    return tuple(accounts), explained, r_squared


def _fit(columns: dict[str, list[float]], y: list[float]) -> tuple[dict[str, float], float]:
    """The coefficients of a least-squares fit with an intercept, and R squared. Of columns that repeat each other the
    least coefficients are taken."""
    import numpy as np  # the help of programs that write reports loads nothing heavy

    x = np.array(list(columns.values())).T
    deviations = x.std(axis=0)
    x = (x - x.mean(axis=0)) / deviations
    centred = np.array(y) - np.mean(y)
    solution = np.linalg.lstsq(x, centred, rcond=None)[0]
    residual = centred - x @ solution
    fitted = dict(zip(columns, (solution / deviations).tolist(), strict=True))
    return fitted, float(1.0 - (residual @ residual) / (centred @ centred))


def _correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    try:
        return statistics.correlation(xs, ys)
    except statistics.StatisticsError:
        return None


def _pairs(matched: Sequence[tuple[Sample, Sample]], held_out: Sequence[str]) -> tuple[Pair, ...]:
    found = []
    for old, new in matched:
        fell = []
        for name in held_out:
            was, now = _number(old, name), _number(new, name)
            if was is not None and now is not None and now < was:
                fell.append(name)
        gain = (_number(new, SCORE) or 0.0) - (_number(old, SCORE) or 0.0)
        if fell and gain > 0:
            found.append((gain, Pair(old, new, tuple(fell))))
    found.sort(key=lambda each: -each[0])
    return tuple(pair for _, pair in found[:MOST_PAIRS])
