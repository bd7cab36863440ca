"""Samples of ranked responses: some at every evaluation, many before and after training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from threestep.plugins.samples import observer
from threestep.plugins.samples.observer import RankedSamples
from threestep.plugins.samples.ranked import least_margin, ranked_samples
from threestep.plugins.samples.samples import SampleTexts
from training.utils.contracts.documents import MediaSpan
from training.utils.contracts.rows import ResponsesRow
from training.utils.preference.evaluation import ScoredResponses

TEXT = SampleTexts(decode=lambda ids: "-".join(map(str, ids)), end_token_ids=frozenset({1}))


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
    found = ranked_samples(rows(2, 3, 2), scored(2, 3, 2).of_prompts([2, 1]), TEXT)
    assert [sample["scores"] for sample in found] == [[25.0, 36.0], [4.0, 9.0, 16.0]]
    assert [sample["margin"] for sample in found] == [-11.0, -12.0]
    assert [sample["prompt_index"] for sample in found] == [2, 1] and len({sample["uid"] for sample in found}) == 2
    assert (found[0]["prompt"], found[0]["responses"]) == ("5-2", ["20", "21"])


def test_a_single_response_has_no_margin():
    (sample,) = ranked_samples(rows(1), scored(1).of_prompts([0]), TEXT)
    assert sample["scores"] == [0.0] and "margin" not in sample


def test_pairs_with_the_same_texts_and_other_pictures_are_told_apart():
    samples = SampleTexts(lambda ids: "text", keeper=lambda spans: [f"sha {span.key}" for span in spans])
    seen = [replace(pair, media=(MediaSpan(0, 1, key=key),)) for key, pair in enumerate(rows(2, 2))]
    one, other = ranked_samples(seen, scored(2, 2).of_prompts([0, 1]), samples)
    assert (one["images"], other["images"]) == (["sha 0"], ["sha 1"]) and one["uid"] != other["uid"]


@pytest.mark.parametrize(("around", "most", "written"), [(True, 1000, 9), (False, 1000, 2), (True, 4, 5)])
def test_many_before_and_after_training_and_some_between(around, most, written, monkeypatch):
    monkeypatch.setattr(observer, "MOST_ROWS", most)
    samples = RankedSamples(rows(*[2] * 9), [3, 7], TEXT)
    wanted = samples.wanted(around_training=around)
    assert [*wanted[:2]] == [3, 7] and len(wanted) == len(set(wanted)) == written
    lines = samples.scored(scored(*[2] * 9).of_prompts(wanted))
    assert [line["prompt_index"] for line in lines] == wanted
