"""Many prompts at once get the answers that each gets alone; --reward scores them."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.data_flags import data_flags
from threestep.plugins.evaluation.answer_figures import answer_samples
from threestep.plugins.evaluation.answers import answers_to, combined_values, scores_of
from threestep.plugins.evaluation.scorer import load_answer_scorer
from threestep.plugins.evaluation.tests.conftest import CPU
from training.utils.data.arguments import DataArguments
from training.utils.data.build.row_maker import PromptMaker
from training.utils.engine.ranks.startup import Ranks
from training.utils.generation.arguments import SamplingArguments
from training.utils.rewards.arguments import Combination, ScoringArguments
from training.utils.rewards.weighted import Reward

ALONE = Ranks(0, 0, 1, CPU)
WORDS = ("fig", "pear", "2", "apple")

SCORING = ScoringArguments()


def test_answers_and_scores(asked, save_model, monkeypatch):
    asked = dataclasses.replace(asked, data=data_flags(max_prompt_seq_len=64))
    maker = PromptMaker(asked.data, asked.tokenizer)
    rows = [maker.make(f"Human: {word}? Assistant:", word, place) for place, word in enumerate(("fig", "pear", "2"))]
    flags = SamplingArguments(max_new_tokens=5)
    together = answers_to(asked, rows, flags, seed=1, rows_per_batch=2)
    assert [answer.token_ids for answer in answers_to(asked, rows, flags, 1, rows_per_batch=3)] == [
        a.token_ids for a in together
    ]

    def length(prompts, responses, ground_truth, **columns):
        assert ground_truth == ["fig", "pear", "2"]
        return [float(len(response)) for response in responses]

    scorer = load_answer_scorer(save_model("reward", scalar=True), None, DataArguments(), ALONE)
    rewards = (Reward("length", 2.0, length), Reward("model", 0.5, None))
    found = scores_of(asked, rows, together, rewards, scorer=scorer, flags=SCORING)
    for row, answer, score in zip(rows, together, found.total, strict=True):
        [own] = scorer.score_ids([row.flipped_prompt_ids[::-1].tolist()], [list(answer.token_ids)])
        assert score == pytest.approx(2.0 * len(answer.text) + 0.5 * own, abs=1e-4)
    assert list(found.parts) == ["length", "model"] and found.parts["length"] == [len(a.text) for a in together]
    # Two answers to each prompt: the first as alone, and each scored with its own prompt.
    twice = answers_to(asked, rows, flags, seed=1, rows_per_batch=2, samples=2)
    assert [answer.token_ids for answer in twice[::2]] == [answer.token_ids for answer in together]
    assert scores_of(asked, rows, twice, rewards[1:], scorer=scorer, flags=SCORING).total[::2] == pytest.approx(
        [0.5 * value for value in found.parts["model"]], abs=1e-4
    )
    # A reward that does not apply to an answer is left out of its sum, and of its sample.
    some = Reward("some", 1.0, lambda prompts, responses, **columns: [None, 1.0, None])
    found = scores_of(asked, rows, together, (rewards[0], some), scorer=None, flags=SCORING)
    assert found.total == [2.0 * len(answer.text) + extra for answer, extra in zip(together, (0, 1, 0), strict=True)]
    assert ["reward/some" in sample for sample in answer_samples(rows, together, found)] == [False, True, False]
    assert scores_of(asked, rows, together, (some,), scorer=None, flags=SCORING).total == [0, 1, 0]
    # A reward model with another tokenizer reads the texts.
    monkeypatch.setattr("threestep.plugins.evaluation.answers.same_tokenizer", lambda one, other: False)
    assert scores_of(asked, rows, together, rewards[1:], scorer=scorer, flags=SCORING).total != [0.0, 0.0, 0.0]


def test_weights_scale_members_and_of_weight_0_is_none():
    assert combined_values([[1.0], [2.0], [50.0]], [3.0, 0.5, 0.0], Combination("mean")) == [2.0]
    assert combined_values([[1.0], [2.0], [-50.0]], [3.0, 0.5, 0.0], Combination("minimum")) == [1.0]
