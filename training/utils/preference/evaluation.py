"""Figures of a reward model from its scores: pure functions of numbers that all ranks have gathered.

R responses, Q pairs of responses to the same prompt, the first ranked above the second. Figures are float64; one of no
values is None, never NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# A pair is (tokens of better) - (tokens of worse) longer; the buckets begin here, the first is open below.
LENGTH_BUCKETS = (-32, -8, 0, 1, 9, 33)
CALIBRATION_BINS = 10  # of equal width, from a predicted 0.5 to 1
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
HISTOGRAM_BINS = 20


@dataclass(frozen=True, eq=False)
class ScoredResponses:
    """Responses prompt by prompt, best first.

    prompt_R: int64, the prompt's number, ascending
    score_R: float64
    tokens_R: int64, of the response with its end token
    """

    prompt_R: np.ndarray
    score_R: np.ndarray
    tokens_R: np.ndarray

    def of_prompts(self, prompts: Sequence[int]) -> dict[int, list[float]]:
        """Return the scores of some prompts' responses, by the prompt's number."""
        first, end = (np.searchsorted(self.prompt_R, prompts, side=side).tolist() for side in ("left", "right"))
        return {prompt: self.score_R[a:b].tolist() for prompt, a, b in zip(prompts, first, end, strict=True)}


@dataclass(frozen=True)
class Spread:
    """Statistics of scores. std: of the population, 0 for one score. percentiles: p1 to p99, linearly interpolated."""

    count: int
    mean: float
    std: float
    percentiles: dict[str, float]


@dataclass(frozen=True)
class LengthBucket:
    """Pairs whose better response is `least` to `most` tokens longer than the worse; None is no bound."""

    least: int | None
    most: int | None
    pairs: int
    accuracy: float | None


@dataclass(frozen=True)
class CalibrationBin:
    """Pairs whose likelier order has a predicted probability from `least` to `most`. predicted: its mean. right: the
    share of them in that order; a tie counts half."""

    least: float
    most: float
    pairs: int
    predicted: float | None
    right: float | None


@dataclass(frozen=True)
class Histogram:
    """Counts between neighbouring `edges`, which span both kinds of scores."""

    edges: list[float]
    chosen: list[int]
    rejected: list[int]


@dataclass(frozen=True)
class RewardEvaluation:
    """A reward model's ranking of responses.

    ties: pairs with equal scores
    accuracy: share of pairs whose better response scores strictly higher; a tie is wrong
    accuracy_shorter, accuracy_longer: over the pairs whose better response has fewer (more) tokens; a model that reads
        length alone has 0 in one and 1 in the other
    score_gap: mean of better - worse
    loss: mean over prompts of the mean over their pairs of -log sigmoid(better - worse), without training's options
    calibration_error: mean over pairs of |predicted - right| of their bin (Guo et al. 2017, equation 3)
    chosen: scores of each prompt's best response; rejected: of all others
    """

    prompts: int
    pairs: int
    ties: int
    accuracy: float | None
    accuracy_shorter: float | None
    accuracy_longer: float | None
    score_gap: float | None
    loss: float | None
    calibration_error: float | None
    chosen: Spread | None
    rejected: Spread | None
    by_length: list[LengthBucket]
    calibration: list[CalibrationBin]
    histogram: Histogram

    @property
    def in_words(self) -> str:
        """The main figures; "" without pairs."""
        if self.accuracy is None or self.loss is None or self.score_gap is None:
            return ""
        return f"loss {self.loss:.3f}, pair accuracy {self.accuracy:.3f}, score gap {self.score_gap:.2f}"

    def figures(self) -> dict[str, float]:
        """All numbers by name, those of the spreads included; None is left out."""
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, (int, float))}
        for name, spread in (("chosen", self.chosen), ("rejected", self.rejected)):
            if spread is not None:
                statistics = {"mean": spread.mean, "std": spread.std, **spread.percentiles}
                numbers |= {f"{name}_{figure}": value for figure, value in statistics.items()}
        return numbers


def evaluation_from(plain: dict[str, Any]) -> RewardEvaluation:
    """The inverse of dataclasses.asdict, also after a round trip through JSON."""

    records: dict[str, type] = {"chosen": Spread, "rejected": Spread, "by_length": LengthBucket}
    records |= {"calibration": CalibrationBin, "histogram": Histogram}

    def field(name: str, value: Any) -> Any:
        if name not in records or value is None:
            return value
        return [records[name](**each) for each in value] if isinstance(value, list) else records[name](**value)

    return RewardEvaluation(**{name: field(name, value) for name, value in plain.items()})


def evaluate(scored: ScoredResponses) -> RewardEvaluation:
    """Every figure of the pairs of `scored`. A prompt with one response has no pair and counts in `chosen` alone."""
    better_Q, worse_Q, weight_Q = pairs_of(scored.prompt_R)
    gap_Q = scored.score_R[better_Q] - scored.score_R[worse_Q]
    longer_Q = scored.tokens_R[better_Q] - scored.tokens_R[worse_Q]
    right_Q = gap_Q > 0
    is_chosen_R = _is_first(scored.prompt_R)
    chosen, rejected = scored.score_R[is_chosen_R], scored.score_R[~is_chosen_R]
    bins = calibration_bins(gap_Q)
    return RewardEvaluation(
        prompts=int(is_chosen_R.sum()),
        pairs=len(gap_Q),
        ties=int((gap_Q == 0).sum()),
        accuracy=_mean(right_Q),
        accuracy_shorter=_mean(right_Q[longer_Q < 0]),
        accuracy_longer=_mean(right_Q[longer_Q > 0]),
        score_gap=_mean(gap_Q),
        loss=float(weight_Q @ np.logaddexp(0.0, -gap_Q) / weight_Q.sum()) if len(gap_Q) else None,
        calibration_error=calibration_error(bins),
        chosen=spread(chosen),
        rejected=spread(rejected),
        by_length=length_buckets(longer_Q, right_Q),
        calibration=bins,
        histogram=histogram(chosen, rejected),
    )


def decimals(value: float | None, places: int = 3) -> str:
    """`value` with `places` decimals, or a dash for None."""
    return "-" if value is None else f"{value:.{places}f}"


def gain_sentence(before: RewardEvaluation, after: RewardEvaluation) -> str:
    """The effect of training, in half a line."""
    accuracy = f"{decimals(before.accuracy)} -> {decimals(after.accuracy)}"
    return f"pair accuracy {accuracy}, score gap {decimals(after.score_gap, 2)}"


def pairs_of(prompt_R: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(better_Q, worse_Q, weight_Q): every pair of one prompt's responses; the weights of a prompt's pairs add to 1."""
    starts = np.flatnonzero(_is_first(prompt_R))
    better, worse, weights = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]
    for start, responses in zip(starts, np.diff(np.append(starts, len(prompt_R))), strict=True):
        first, second = np.triu_indices(responses, k=1)
        better.append(start + first)
        worse.append(start + second)
        weights.append(np.full(len(first), 1.0 / max(len(first), 1)))
    return np.concatenate(better), np.concatenate(worse), np.concatenate(weights)


def length_buckets(longer_Q: np.ndarray, right_Q: np.ndarray) -> list[LengthBucket]:
    """Accuracy by how much longer the better response is."""
    bucket_Q = np.digitize(longer_Q, LENGTH_BUCKETS)
    bounds = [None, *LENGTH_BUCKETS, None]
    return [
        LengthBucket(least, None if end is None else end - 1, int(inside.sum()), _mean(right_Q[inside]))
        for (least, end), inside in (
            (bounds[index : index + 2], bucket_Q == index) for index in range(len(LENGTH_BUCKETS) + 1)
        )
    ]


def calibration_bins(gap_Q: np.ndarray) -> list[CalibrationBin]:
    """Compare the predicted probability sigmoid(|gap|) of the order of the scores with how often that order is right.

    Equal scores predict 1/2 for either order, one of which is right: they count half.
    """
    predicted_Q = 1.0 / (1.0 + np.exp(-np.abs(gap_Q)))
    right_Q = np.where(gap_Q == 0, 0.5, gap_Q > 0)
    bin_Q = np.minimum(((predicted_Q - 0.5) * 2 * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)
    edges = np.linspace(0.5, 1.0, CALIBRATION_BINS + 1).round(10).tolist()
    bins = []
    for index, (least, most) in enumerate(zip(edges, edges[1:], strict=False)):
        inside = bin_Q == index
        bins.append(CalibrationBin(least, most, int(inside.sum()), _mean(predicted_Q[inside]), _mean(right_Q[inside])))
    return bins


def calibration_error(bins: list[CalibrationBin]) -> float | None:
    """Expected calibration error: |predicted - right| of each bin, weighed by its pairs."""
    pairs = sum(one.pairs for one in bins)
    if pairs == 0:
        return None
    wrong_by = (
        one.pairs * abs(one.predicted - one.right)
        for one in bins
        if one.predicted is not None and one.right is not None
    )
    return sum(wrong_by) / pairs


def spread(scores: np.ndarray) -> Spread | None:
    """Mean, standard deviation and percentiles; None without scores."""
    if len(scores) == 0:
        return None
    values = np.percentile(scores, PERCENTILES).tolist()
    names = [f"p{percent}" for percent in PERCENTILES]
    return Spread(len(scores), float(scores.mean()), float(scores.std()), dict(zip(names, values, strict=True)))


def histogram(chosen: np.ndarray, rejected: np.ndarray) -> Histogram:
    """Count the scores of each between the same edges."""
    both = np.concatenate([chosen, rejected])
    if len(both) == 0:
        return Histogram([], [], [])
    edges = np.histogram_bin_edges(both, HISTOGRAM_BINS)
    counts = [np.histogram(scores, edges)[0].tolist() for scores in (chosen, rejected)]
    return Histogram(edges.tolist(), *counts)


def _is_first(prompt_R: np.ndarray) -> np.ndarray:
    """bool [R], True where a prompt's responses begin."""
    return np.diff(prompt_R, prepend=-1) != 0


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
