"""Figures of scores: by hand, without NaN however few there are, and a model that reads length alone is seen."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.utils.preference.evaluation import (
    ScoredResponses,
    calibration_bins,
    calibration_error,
    evaluate,
    evaluation_from,
    spread,
)


def scored(*prompts: list[tuple[float, int]]) -> ScoredResponses:
    """prompts: (score, tokens) of each response, best first."""
    numbers = [number for number, responses in enumerate(prompts) for _ in responses]
    both = [response for responses in prompts for response in responses]
    return ScoredResponses(
        np.array(numbers, np.int64), np.array([score for score, _ in both]), np.array([n for _, n in both], np.int64)
    )


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


# Pairs and (gap, tokens by which better is longer): prompt 0 (2, -2); prompt 1 (0, 0), a tie; prompt 2, three ranked
# responses: (-1, -8), (1.5, -48), (2.5, -40).
BY_HAND = scored([(2.0, 3), (0.0, 5)], [(1.0, 4), (1.0, 4)], [(0.5, 2), (1.5, 10), (-1.0, 50)])


def test_by_hand():
    found = evaluate(BY_HAND)
    assert (found.prompts, found.pairs, found.ties) == (3, 5, 1)
    assert found.accuracy == 3 / 5  # the tie is wrong
    assert found.accuracy_shorter == 3 / 4 and found.accuracy_longer is None
    assert found.score_gap == pytest.approx((2 + 0 - 1 + 1.5 + 2.5) / 5)
    third = (softplus(1.0) + softplus(-1.5) + softplus(-2.5)) / 3  # its three pairs weigh as one prompt
    assert found.loss == pytest.approx((softplus(-2.0) + softplus(0.0) + third) / 3)
    assert (found.chosen.count, found.rejected.count) == (3, 4)
    assert found.chosen.mean == pytest.approx(3.5 / 3) and found.rejected.mean == pytest.approx(1.5 / 4)
    # 2, 1 and 0.5 around 7/6: squares 25/36, 1/36, 16/36
    assert found.chosen.std == pytest.approx(math.sqrt(42 / 36 / 3))
    assert sum(found.histogram.chosen) == 3 and sum(found.histogram.rejected) == 4
    edges = found.histogram.edges
    assert (edges[0], edges[-1]) == (-1.0, 2.0) and len(edges) == len(found.histogram.chosen) + 1
    figures = found.figures()
    assert (figures["accuracy"], figures["ties"]) == (0.6, 1)
    assert (figures["chosen_p50"], figures["rejected_p50"]) == (1.0, 0.5)
    assert {"chosen_mean", "chosen_std", "rejected_p1", "rejected_p99", "calibration_error", "loss"} <= set(figures)
    assert "accuracy_longer" not in figures and "by_length" not in figures
    assert spread(np.arange(5.0)).percentiles["p5"] == pytest.approx(0.2)  # on the line between scores
    assert spread(np.array([7.0])).std == 0.0 and spread(np.zeros(0)) is None


def test_accuracy_by_length():
    buckets = {(one.least, one.most): (one.pairs, one.accuracy) for one in evaluate(BY_HAND).by_length}
    assert list(buckets) == [(None, -33), (-32, -9), (-8, -1), (0, 0), (1, 8), (9, 32), (33, None)]
    assert buckets[None, -33] == (2, 1.0) and buckets[-8, -1] == (2, 0.5) and buckets[0, 0] == (1, 0.0)
    assert [buckets[bounds] for bounds in ((-32, -9), (1, 8), (9, 32), (33, None))] == [(0, None)] * 4


@pytest.mark.parametrize(("longer", "bucket"), [(-33, 0), (-32, 1), (-9, 1), (-8, 2), (-1, 2), (0, 3), (1, 4), (8, 4)])
def test_the_buckets_bounds_are_inside(longer, bucket):
    for sign, place in ((1, bucket), (-1, 6 - bucket)):
        found = evaluate(scored([(1.0, 100 + sign * longer), (0.0, 100)]))
        assert [one.pairs for one in found.by_length] == [int(index == place) for index in range(7)]


def test_a_model_that_reads_length_alone_is_seen():
    dice = np.random.default_rng(0)
    lengths = dice.integers(1, 60, (200, 2))
    found = evaluate(scored(*([(float(n), int(n)) for n in pair] for pair in lengths)))
    assert (found.accuracy_shorter, found.accuracy_longer) == (0.0, 1.0)
    assert 0.3 < found.accuracy < 0.7


def test_calibration_by_hand():
    # sigmoid(ln 4) = 0.8: a gap of ln 4 is right three times of four, a gap of 0 is right by half.
    bins = calibration_bins(np.array([math.log(4)] * 3 + [-math.log(4), 0.0]))
    filled = {one.least: (one.pairs, one.predicted, one.right) for one in bins if one.pairs}
    assert filled[0.5] == (1, 0.5, 0.5)
    (place,) = set(filled) - {0.5}
    assert filled[place] == (4, pytest.approx(0.8), 0.75)
    assert calibration_error(bins) == pytest.approx(4 * 0.05 / 5)
    assert (bins[0].least, bins[-1].most, len(bins)) == (0.5, 1.0, 10)
    assert [one.pairs for one in calibration_bins(np.array([1e6, -1e6]))] == [0] * 9 + [2]


def test_a_calibrated_model_has_a_small_error_and_a_bold_one_has_not():
    dice = np.random.default_rng(1)
    gaps = dice.normal(0, 2, 20_000)
    truly = np.where(dice.random(gaps.size) < 1 / (1 + np.exp(-gaps)), gaps, -gaps)
    assert calibration_error(calibration_bins(truly)) < 0.02
    assert calibration_error(calibration_bins(5 * truly)) > 0.1


@pytest.mark.parametrize("responses", [[], [[(1.0, 3)]], [[(1.0, 3), (1.0, 3)]]], ids=["nothing", "no_pair", "one_tie"])
def test_few_rows_give_none_and_never_nan(responses):
    found = evaluate(scored(*responses))
    text = json.dumps(asdict(found), allow_nan=False)
    assert json.loads(text)["pairs"] == (1 if responses and len(responses[0]) == 2 else 0)
    assert all(math.isfinite(value) for value in found.figures().values())
    if not found.pairs:
        assert found.accuracy is None and found.loss is None and found.calibration_error is None
        assert found.rejected is None and "accuracy" not in found.figures()


ranked = st.lists(st.lists(st.integers(-3, 3), min_size=1, max_size=4), min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(ranked)
def test_against_loops(prompts):
    found = evaluate(scored(*([(float(score), score % 5 + 1) for score in scores] for scores in prompts)))
    pairs = [(a, b) for scores in prompts for i, a in enumerate(scores) for b in scores[i + 1 :]]
    assert found.pairs == len(pairs) and found.ties == sum(a == b for a, b in pairs)
    with_pairs = [scores for scores in prompts if len(scores) > 1]
    if pairs:
        assert found.accuracy == pytest.approx(sum(a > b for a, b in pairs) / len(pairs))
        losses = []
        for scores in with_pairs:
            own = [softplus(b - a) for i, a in enumerate(scores) for b in scores[i + 1 :]]
            losses.append(sum(own) / len(own))
        assert found.loss == pytest.approx(sum(losses) / len(losses))
    assert sum(one.pairs for one in found.by_length) == sum(one.pairs for one in found.calibration) == len(pairs)


def test_an_evaluation_comes_back_from_json():
    for scored in (
        ScoredResponses(np.array([0, 0, 1, 1]), np.array([0.1, 0.3, 2.0, -1.0]), np.array([3, 4, 40, 2])),
        ScoredResponses(np.array([], np.int64), np.array([]), np.array([], np.int64)),
    ):
        result = evaluate(scored)
        assert evaluation_from(json.loads(json.dumps(asdict(result)))) == result
