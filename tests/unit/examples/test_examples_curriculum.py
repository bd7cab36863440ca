"""The worked curriculum: what it asks for after what it was told."""

from __future__ import annotations

import numpy as np

from examples.curriculum import SureQuestions, WorstAgain
from threestep.plugins.curriculum.prompts import RolloutResults
from training.utils.contracts.rows import PromptRow


def rows(count):
    ids = np.zeros(1, np.int32)
    return [PromptRow(i, ids, f"Human: {i}? Assistant:", str(i), {"level": i}) for i in range(count)]


def test_every_prompt_once_and_then_the_worst():
    prompts = rows(4)
    sampler = WorstAgain(prompts, seed=1)
    assert sampler.take(0, 3) == [0, 1, 2]
    sampler.update([row.uid for row in prompts[:3] for _ in range(2)], [1, 1, -1, 0, 0, 1])  # means 1, -0.5, 0.5
    assert sampler.take(3, 3) == [3, 1, 2]
    sampler.update([prompts[1].uid, prompts[3].uid], [9.0, 0.75])
    assert sampler.take(6, 6) == [2, 3, 0, 1, 2, 3]


def test_scores_of_prompts_that_it_did_not_take():
    """As of dynamic sampling: they count once the prompt is taken, and again if it is worst."""
    prompts = rows(3)
    sampler = WorstAgain(prompts, seed=1)
    assert sampler.take(0, 1) == [0]
    sampler.update([prompts[0].uid, prompts[2].uid], [1.0, -1.0])
    assert sampler.take(1, 3) == [1, 2, 0]
    sampler.update([prompts[1].uid], [0.0])
    assert sampler.take(4, 3) == [2, 1, 0]


def test_the_best_response_is_asked_about():
    class Maker:
        def make(self, prompt, ground_truth, row_id, **columns):
            return PromptRow(row_id, np.zeros(1, np.int32), prompt, ground_truth, columns)

    prompts = rows(2)
    dataset = SureQuestions(prompts, Maker(), seed=1)
    dataset.on_batch_end(RolloutResults(rows=prompts, responses=[" a", " b"], scores=[0.0, 2.0]))
    assert len(dataset) == 3 and dataset[2].prompt_text == "Human: 1? Assistant: b Human: Are you sure? Assistant:"
    assert dataset[2].reference == "1" and dataset[2].columns == {"level": 1, "asked_again": True}
