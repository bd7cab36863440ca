"""Samples of ranked responses: some at every evaluation, many before and after training."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from training.utils.contracts.media_spans import MediaSpan
from training.utils.contracts.rows import ResponsesRow
from training.utils.preference import samples as ranked
from training.utils.preference.evaluation import ScoredResponses
from training.utils.preference.samples import least_margin, ranked_samples, write_ranked_samples
from training.utils.setup.samples import EvaluationSamples

TEXT = EvaluationSamples(2, decode=lambda ids: "-".join(map(str, ids)), end_token_ids=frozenset({1}))


def rows(*responses: int) -> list[ResponsesRow]:
    def ids(*numbers: int) -> np.ndarray:
        return np.array(numbers, dtype=np.int32)

    return [
        ResponsesRow(number, ids(5, number), tuple(ids(10 * number + place, 1) for place in range(count)))
        for number, count in enumerate(responses)
    ]


def scored(*responses: int) -> ScoredResponses:
    """Scores 0, 1, 2, ... in the order of the responses."""
    prompts = np.repeat(np.arange(len(responses)), responses)
    return ScoredResponses(prompts, np.arange(len(prompts), dtype=np.float64) ** 2, np.ones(len(prompts), np.int64))


def test_the_least_margin_is_that_of_the_worst_pair():
    assert least_margin([3.0, 1.0]) == 2.0
    assert least_margin([1.0, 3.0]) == -2.0
    assert least_margin([2.0, 0.5, 1.0]) == -0.5


def test_each_row_has_its_own_scores():
    found = ranked_samples(rows(2, 3, 2), [2, 1], scored(2, 3, 2), TEXT)
    assert [sample["scores"] for sample in found] == [[25.0, 36.0], [4.0, 9.0, 16.0]]
    assert [sample["margin"] for sample in found] == [-11.0, -12.0]
    assert [sample["prompt_index"] for sample in found] == [2, 1] and len({sample["uid"] for sample in found}) == 2
    assert (found[0]["prompt"], found[0]["responses"]) == ("5-2", ["20", "21"])


def test_a_single_response_has_no_margin():
    (sample,) = ranked_samples(rows(1), [0], scored(1), TEXT)
    assert sample["scores"] == [0.0] and "margin" not in sample


def test_pairs_with_the_same_texts_and_other_pictures_are_told_apart():
    pictures: Any = SimpleNamespace(names=lambda spans: [f"sha {span.key}" for span in spans])
    samples = EvaluationSamples(2, decode=lambda ids: "text", keeper=pictures)
    seen = [replace(pair, media=(MediaSpan(0, 1, key=key),)) for key, pair in enumerate(rows(2, 2))]
    one, other = ranked_samples(seen, [0, 1], scored(2, 2), samples)
    assert (one["images"], other["images"]) == (["sha 0"], ["sha 1"]) and one["uid"] != other["uid"]


@pytest.mark.parametrize(("step", "most", "written"), [(0, 1000, 9), (5, 1000, 2), (10, 1000, 9), (10, 4, 5)])
def test_many_before_and_after_training_and_some_between(step, most, written, monkeypatch):
    monkeypatch.setattr(ranked, "MOST_ROWS", most)
    lines: list[Any] = []
    samples = SimpleNamespace(rows=lambda total, seed: [3, 7], write=lambda metrics, step, own: lines.extend(own))
    samples.text, samples.media = TEXT.text, TEXT.media
    settings = SimpleNamespace(seed=1, total_steps=10)
    run: Any = SimpleNamespace(samples=samples, eval_rows=rows(*[2] * 9), settings=settings, metrics=None)
    write_ranked_samples(run, step, scored(*[2] * 9))
    indices = [line["prompt_index"] for line in lines]
    assert indices[:2] == [3, 7] and len(indices) == len(set(indices)) == written
