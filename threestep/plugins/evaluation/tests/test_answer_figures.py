"""Figures of one or of several answers to each prompt, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from threestep.plugins.evaluation.answer_figures import answer_figures, answer_samples, share
from threestep.plugins.evaluation.answers import Scores
from threestep.plugins.evaluation.model import Answer
from training.utils.contracts.rows import PromptRow


def rows(*sources: str) -> list[PromptRow]:
    return [PromptRow(n, np.array([3]), f"p{n}", "r", {"data_source": source}) for n, source in enumerate(sources)]


def said(*texts: str) -> list[Answer]:
    return [Answer(text, tuple(range(len(text))), True) for text in texts]


def test_one_answer_to_each_prompt():
    """Gains 1, 0, -0.5, 0.5: two wins, a tie and a loss are 2.5 of 4."""
    answers = [Answer("", (1, 2), True), Answer("", (1,), False), Answer("", (1,), True), Answer("", (1,), True)]
    sides = [
        answer_samples(rows(*"aaaa"), answers, Scores(total, {"rule": total}))
        for total in ([2.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.5, 0.5])
    ]
    figures = answer_figures(sides, seed=0)
    assert (figures["prompts"], figures["wins"], figures["ties"], figures["losses"]) == (4, 2, 1, 1)
    assert figures["win_rate"].value == 0.625 and figures["reward_gain"].value == 0.25
    assert figures["answer_tokens"] == 1.25 and figures["baseline_ended_share"] == 0.75
    assert not any("/" in name or "@" in name for name in figures)  # one source, one reward, one answer


def test_several_answers_by_source_and_by_key():
    """Four answers to each of two prompts; right 1, 0, 0, 0 and 1, 1, 1, 0: pass@2 is 1 - 3/6 and 1 - 0."""
    texts = ("x", "y", "y", "z", "x", "x", "x", "y")
    right = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    digits = [1.0, 2.0, 2.0, 3.0, 7.0, 7.0, 7.0, 8.0]
    scores = Scores(right, {"rule": right, "rule/answer": digits})
    samples = answer_samples(rows("a/math", "b/code"), said(*texts), scores)
    assert [(own["prompt_index"], own["sample"]) for own in samples][3:5] == [(0, 3), (1, 0)]
    figures = answer_figures([samples], seed=0)
    assert figures["prompts"] == 2 and figures["reward"].value == 0.5
    assert figures["reward_best@2"].value == pytest.approx((0.5 + 1.0) / 2)
    assert figures["reward_best@4"].value == 1.0 and figures["reward_worst@4"].value == 0.0
    # Votes are by the rule's answer: 2 of 1, 2, 2, 3 is wrong, 7 of 7, 7, 7, 8 right.
    assert figures["reward_majority@4"].value == 0.5 == figures["reward/rule_majority@4"].value
    assert figures["math/reward_best@2"].value == 0.5 and figures["code/reward/rule/answer"].value == 7.25
    assert figures["math/reward/rule/answer_best@4"].value == 3.0
    low, high = figures["reward_best@2"].low, figures["reward_best@2"].high
    assert 0.5 <= low <= 0.75 <= high <= 1.0


def test_several_answers_of_two_models_meet_one_by_one():
    """Gains 1, 0 and -1, 1: a win and a tie are 0.75 of the first prompt, a loss and a win half of the second."""
    sides = [
        answer_samples(rows("a", "a"), said(*"abcd"), Scores(total, {"rule": total}))
        for total in ([1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0])
    ]
    figures = answer_figures(sides, seed=0)
    assert (figures["wins"], figures["ties"], figures["losses"]) == (2, 1, 1)
    assert figures["win_rate"].value == 0.625 and figures["reward_gain"].value == 0.25
    assert figures["baseline_reward"].value == 0.25


def test_wilson_by_hand():
    """8 of 10, z = 1.96: centre (0.8 + 3.8415/20) / (1 + 3.8415/10) = 0.9921/1.3841 = 0.7167, half width
    1.96/1.3841 * sqrt(0.16/10 + 3.8415/400) = 1.4160 * 0.1600 = 0.2266."""
    figure = share(8, 10)
    assert figure.value == 0.8
    assert (figure.low, figure.high) == pytest.approx((0.4902, 0.9433), abs=5e-5)
    assert str(figure) == "0.800 (95 % from 0.490 to 0.943)"


def test_wilson_where_all_or_none_succeed():
    """0 of n: the upper end is z^2 / (n + z^2)."""
    none, every = share(0, 20), share(20, 20)
    assert (none.low, none.high) == pytest.approx((0.0, 3.8415 / 23.8415), abs=1e-5)
    assert (every.low, every.high) == pytest.approx((1 - none.high, 1.0), abs=1e-9)
