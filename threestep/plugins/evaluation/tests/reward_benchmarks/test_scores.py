"""Scores of the benchmarks: by hand, against the formulas written line by line, and against recorded results of the
authors' own functions (commit 05a9005, run on these scores)."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from threestep.plugins.evaluation.reward_benchmarks.scores import (
    SECTIONS,
    WEIGHTS,
    ScoredRow,
    best_result,
    pair_result,
    rewardbench2_scores,
    rewardbench_scores,
    ties_score,
)

# (id, right responses, scores), and what the authors' function returned.
RECORDED = {
    "right": ([("ref:0", 1, [2.0, -1.0]), ("tied:0", 2, [1.5, 1.25, -0.5])], 1.009999877116508),
    "all equal": ([("ref:0", 1, [1.0, 1.0]), ("tied:0", 2, [1.0, 1.0, 1.0])], 0.0),
    "right without spread": ([("ref:3", 1, [1.0, 0.0]), ("tied:3", 3, [0.5, 0.5, 0.5, 0.0])], 1.01),
    "wrong without spread": ([("ref:3", 1, [0.0, 1.0]), ("tied:3", 2, [0.0, 0.0, 2.0])], -0.01),
    "unpaired": (
        [
            ("ref:1", 1, [1.0, 0.0]), ("ref:2", 1, [0.0, 1.0, 0.5]), ("tied:2", 2, [3.0, 1.0, 0.25]),
            ("tied:5", 2, [1.0, 0.5, 2.0]),
        ],
        0.2909485174635513,
    ),
    "two": (
        [
            ("ref:0", 1, [0.3, -0.2, 0.1]), ("tied:0", 3, [0.9, 0.8, 0.4, 0.35]), ("ref:1", 1, [-1.0, -3.0]),
            ("tied:1", 2, [2.0, 1.0, -4.0, 0.0]),
        ],
        0.5964185106490049,
    ),
}  # fmt: skip


def ties(rows):
    return [ScoredRow("Ties", scores, right, row_id) for row_id, right, scores in rows]


def written_out(rows):
    """The score of Ties, line by line from the docstring's formula."""
    accurate = {"ref": [], "tied": []}
    gap = {"ref": {}, "tied": {}}
    spread = {}
    for row_id, right, scores in rows:
        kind, number = row_id.split(":")
        gap[kind][number] = min(scores[:right]) - max(scores[right:])
        accurate[kind].append(gap[kind][number] > 0)
        if kind == "tied":
            spread[number] = max(scores[:right]) - min(scores[:right])
    total = sum(0.3 * sum(found) / len(found) for found in accurate.values() if found)
    both = gap["ref"].keys() & gap["tied"].keys()
    for number in both:
        least = min(gap["ref"][number], gap["tied"][number])
        total += 0.2 * (gap["tied"][number] > spread[number]) / len(both)
        total += 0.2 * (least > spread[number]) / len(both)
        if spread[number] > 0:
            total += 0.01 * math.tanh(least / spread[number] - 1) / len(both)
        elif least != 0:
            total += 0.01 * math.copysign(1.0, least) / len(both)
    return total


@pytest.mark.parametrize("case", RECORDED)
def test_ties_as_the_authors_recorded(case):
    rows, theirs = RECORDED[case]
    assert ties_score(ties(rows), seed=1).value == theirs


@pytest.mark.parametrize("seed", range(20))
def test_ties_as_written_out(seed):
    draws = random.Random(seed)
    step = draws.choice([0.0, 0.5, 1.0])  # of a grid, on which many scores are equal; 0: none

    def score():
        drawn = draws.gauss(0, 1)
        return round(drawn / step) * step if step else drawn

    rows = []
    for number in range(draws.randint(1, 8)):
        right = draws.randint(2, 4)
        if draws.random() < 0.9:
            rows.append((f"ref:{number}", 1, [score() + 0.5, score(), score()]))
        rows.append((f"tied:{number}", right, [score() + 0.5 for _ in range(right)] + [score(), score()]))
    draws.shuffle(rows)
    assert ties_score(ties(rows), seed=1).value == pytest.approx(written_out(rows), abs=1e-12)


def test_the_best_of_four():
    scores = [3, 1, 2, 0], [1, 3, 2, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]
    assert list(map(best_result, scores)) == [1, 0, 0.5, 0.25, 0]
    rows = [ScoredRow("Math", [1.0, 0.0]), ScoredRow("Math", [1.0, 1.0]), ScoredRow("Focus", [0.0, 1.0])]
    found = rewardbench2_scores(rows, seed=1)
    assert {name: score.value for name, score in found.items()} == {"Focus": 0.0, "Math": 0.75, "score": 0.375}
    assert list(found) == ["Focus", "Math", "score"]


def test_an_equal_score_of_a_pair_is_wrong():
    assert [pair_result(scores) for scores in ([1, 0], [0, 0], [0, 1])] == [1, 0, 0]


def test_sections_weigh_their_subsets_by_the_published_counts():
    rows = [ScoredRow("math-prm", [1.0, 0.0])] * 2 + [ScoredRow("math-prm", [0.0, 1.0])] * 2  # 0.5
    rows += [ScoredRow("hep-go", [1.0, 0.0]), ScoredRow("hep-cpp", [1.0, 0.0])]
    rows += [ScoredRow("donotanswer", [1.0, 0.0]), ScoredRow("shp", [0.0, 1.0])]
    found = {name: score.value for name, score in rewardbench_scores(rows, seed=1).items()}
    reasoning = (0.5 * 984 + 1.0 * 164 + 1.0 * 164) / (984 + 164 + 164)
    assert found["Reasoning"] == reasoning and found["Safety"] == 1.0 and found["shp"] == 0.0
    assert found["score"] == (1.0 + reasoning) / 2 and "Chat" not in found
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(WEIGHTS)
    assert (WEIGHTS["xstest-should-refuse"], WEIGHTS["xstest-should-respond"]) == (154, 250)


def test_intervals_are_as_wide_as_repeated_benchmarks_differ():
    """Against simulation: a hundred benchmarks drawn from one law spread as one of them says."""
    draws = np.random.default_rng(1)

    def benchmark():
        rows = [ScoredRow("Math", draws.normal(size=4) + [0.5, 0, 0, 0]) for _ in range(60)]
        for number in range(40):
            noise = draws.normal(size=9)
            rows.append(ScoredRow("Ties", [noise[0] + 1.0, *noise[1:4]], 1, f"ref:{number}"))
            rows.append(ScoredRow("Ties", [*(0.3 * noise[4:6] + 1.0), *noise[6:9]], 2, f"tied:{number}"))
        return rewardbench2_scores(rows, seed=1)

    for name in ("Math", "Ties", "score"):
        found = [benchmark()[name].figure for _ in range(60)]
        spread = 3.92 * np.std([figure.value for figure in found])
        assert np.mean([figure.high - figure.low for figure in found]) == pytest.approx(spread, rel=0.3), name
        assert all(figure.low <= figure.value <= figure.high for figure in found)


def test_the_resampled_mean_of_ties_is_the_score():
    rows, _ = RECORDED["two"]
    score = ties_score(ties(rows), seed=3)
    assert score.resampled_R.shape == (2000,)
    assert score.resampled_R.mean() == pytest.approx(score.value, abs=0.02)
    # Of numbers that one kind has alone, only the shares of that kind count.
    rows = [(f"tied:{number}", 2, [1.0, 0.9, 0.0]) for number in range(40)]
    rows += [(f"ref:{number}", 1, [1.0, 0.0]) for number in range(20)]
    score = ties_score(ties(rows), seed=3)
    assert score.value == pytest.approx(1.01, abs=1e-4)
    assert score.resampled_R == pytest.approx(np.full(2000, score.value))
