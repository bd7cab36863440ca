"""Samples of evaluations: their rows and texts; of ranked responses; and greedy ones of step 1, whatever the ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from threestep.plugins.samples import observer, sentences
from threestep.plugins.samples.observer import RankedSamples, open_samples
from threestep.plugins.samples.ranked import least_margin, ranked_samples
from threestep.plugins.samples.samples import SampleTexts, sample_uid, sampled_rows
from threestep.plugins.samples.sentences import Drawn, GreedyDrawing, Parts, parts_of, sentence_samples
from training.utils.base.seeds import random_state
from training.utils.contracts.documents import MediaSpan
from training.utils.contracts.rollout_engine import Sampling
from training.utils.contracts.rows import ResponsesRow, SentenceRow
from training.utils.contracts.run import EvaluatedRun, HeldOutRows
from training.utils.engine.ranks.startup import Ranks
from training.utils.engine.whole_model import WholeModel
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.preference.evaluation import ScoredResponses


def test_rows_are_drawn_by_the_seed_alone():
    drawn = sampled_rows(5, 100, seed=7)
    assert drawn == sampled_rows(5, 100, seed=7) == sorted(set(drawn)) and len(drawn) == 5
    assert drawn != sampled_rows(5, 100, seed=8) and max(drawn) > 5  # not the first of the data
    assert sampled_rows(5, 3, seed=7) == [0, 1, 2]
    assert sampled_rows(5, 0, seed=7) == sampled_rows(0, 100, seed=7) == []


TEXT = SampleTexts(decode=lambda ids: "-".join(map(str, ids)), end_token_ids=frozenset({1}))


def rows_with_responses(*responses: int) -> list[ResponsesRow]:
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


def test_each_row_has_its_own_scores():
    """And the margin of its worst pair, which a single response has not."""
    found = ranked_samples(rows_with_responses(2, 3, 2), scored(2, 3, 2).of_prompts([2, 1]), TEXT)
    assert [sample["scores"] for sample in found] == [[25.0, 36.0], [4.0, 9.0, 16.0]]
    assert [sample["margin"] for sample in found] == [-11.0, -12.0]
    assert [least_margin(scores) for scores in ([3.0, 1.0], [1.0, 3.0], [2.0, 0.5, 1.0])] == [2.0, -2.0, -0.5]
    assert [sample["prompt_index"] for sample in found] == [2, 1] and len({sample["uid"] for sample in found}) == 2
    assert (found[0]["prompt"], found[0]["responses"]) == ("5-2", ["20", "21"])
    (sample,) = ranked_samples(rows_with_responses(1), scored(1).of_prompts([0]), TEXT)
    assert sample["scores"] == [0.0] and "margin" not in sample


@pytest.mark.parametrize(("around", "most", "written"), [(True, 1000, 9), (False, 1000, 2), (True, 4, 5)])
def test_many_before_and_after_training_and_some_between(around, most, written, monkeypatch):
    monkeypatch.setattr(observer, "MOST_ROWS", most)
    samples = RankedSamples(rows_with_responses(*[2] * 9), [3, 7], TEXT)
    wanted = samples.wanted(around_training=around)
    assert [*wanted[:2]] == [3, 7] and len(wanted) == len(set(wanted)) == written
    lines = samples.scored(scored(*[2] * 9).of_prompts(wanted))
    assert [line["prompt_index"] for line in lines] == wanted


CPU = torch.device("cpu")
NEVER = VOCABULARY + 1
SAMPLING = Sampling(10, temperature=0.0, top_k=0, top_p=1.0, end_token_id=NEVER, pad_token_id=0)


def row(number: int, prompt: int, response: int = 3) -> SentenceRow:
    ids = np.random.default_rng(number).integers(3, VOCABULARY, prompt + response).astype(np.int32)
    return SentenceRow(number, ids, np.arange(prompt + response) >= prompt)


def drawing(model, longest_tokens: int = 40, rows_at_a_time: int = 2) -> GreedyDrawing:
    engine: Any = SimpleNamespace(settings=SimpleNamespace(zero_stage=0))
    return GreedyDrawing(TransformersRollout(), WholeModel(engine, model), SAMPLING, longest_tokens, rows_at_a_time)


@pytest.fixture(scope="module")
def model():
    return tiny_causal_lm("llama")


def test_a_row_is_split_at_its_first_response():
    ids, mask = np.arange(7, dtype=np.int32), np.array([0, 0, 1, 1, 0, 1, 1], dtype=bool)
    assert parts_of(SentenceRow(0, ids, mask)) == Parts([0, 1], [2, 3])
    assert parts_of(SentenceRow(0, ids[:4], mask[:4])) == Parts([0, 1], [2, 3])


def test_responses_are_greedy_and_no_random_state_moves(model):
    rows = {4: row(4, 5), 7: row(7, 12), 9: row(9, 31)}
    model.train()
    before = random_state()
    drawn = drawing(model)(rows, Ranks(0, 0, 1, CPU))
    assert random_state() == before and model.training
    model.eval()
    assert list(drawn) == [4, 7]  # a prompt of 31 tokens leaves 9 of 40, fewer than 10
    for index, found in drawn.items():
        ids = torch.tensor([parts_of(rows[index]).prompt])
        whole = model.generate(ids, do_sample=False, max_new_tokens=10, eos_token_id=NEVER, pad_token_id=0)
        assert (found.ids, found.ended) == (whole[0, ids.shape[1] :].tolist(), False)


def test_ranks_share_the_rows(model, monkeypatch):
    rows = {index: row(index, 3 + index) for index in range(5)}
    alone = drawing(model)(rows, Ranks(0, 0, 1, CPU))
    parts: list = []
    monkeypatch.setattr(sentences, "gathered", lambda part: parts.append(part) or [part])
    for rank in (0, 1):
        drawing(model)(rows, Ranks(rank, rank, 2, CPU))
    assert [sorted(part) for part in parts] == [[0, 2, 4], [1, 3]]
    assert {index: found for part in parts for index, found in part.items()} == alone


def test_lines_of_a_drawn_row_and_of_one_that_was_not():
    rows = {2: row(2, 2, 2), 5: row(5, 3, 2)}
    samples = SampleTexts(decode=lambda ids: " ".join(map(str, ids)), end_token_ids=frozenset({1}))
    drawn, other = sentence_samples(rows, {2: [0.5], 5: [1.5]}, {2: Drawn([6, 1], True)}, samples)
    prompt, truth = (" ".join(map(str, rows[2].input_ids[part])) for part in (slice(2), slice(2, 4)))
    assert drawn == {
        "prompt_index": 2, "uid": sample_uid(prompt, truth), "prompt": prompt, "ground_truth": truth, "loss": 0.5,
        "response": "6", "response_tokens": 2, "ended": True,
    }  # fmt: skip
    assert other.keys() == {"prompt_index", "uid", "prompt", "ground_truth", "loss"} and other["loss"] == 1.5


def samples_of(model, zero_stage: int = 0, loss_on: str = "response", count: int = 8) -> Any:
    engine = SimpleNamespace(settings=SimpleNamespace(zero_stage=zero_stage), ranks=Ranks(0, 0, 1, CPU))
    settings = {"report_samples": count, "seed": 1, "max_seq_len": 100, "loss_on": loss_on}
    tokenizer = SimpleNamespace(decode=str, pad_token_id=0)
    held_out = HeldOutRows(SimpleNamespace(eval=[row(0, 3)], seen=None), [2], None)
    return open_samples(EvaluatedRun(settings, None, WholeModel(engine, model), tokenizer, None, 4, held_out))


def test_what_can_be_drawn_is(model):
    made = samples_of(model)._draw
    assert made is not None and made.sampling.max_new_tokens == 50 and made.sampling.end_token_id == 2
    assert made.sampling.temperature == 0 and made.rows_at_a_time == 4
    assert samples_of(model, count=0) is None
    nothing: Any = None  # a run of step 3 is left alone
    assert open_samples(EvaluatedRun({"report_samples": 8}, nothing, nothing, nothing, None, 4, None)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"zero_stage": 3}, "under --zero_stage 3 no rank holds the full weights"),
        ({"loss_on": "conversation"}, "with --loss_on conversation, a row has no prompt"),
        ({}, "LlamaForCausalLM cannot be decoded prompts of different lengths in one batch: it counts its padding"),
    ],
)
def test_what_cannot_be_drawn_is_named(model, changes, reason, capsys, monkeypatch):
    monkeypatch.setattr(sentences, "why_not_decoded", lambda model, own, way: "it counts its padding")
    made = samples_of(model, **changes)
    assert f"samples show the loss of each row, but no generated responses: {reason}" in capsys.readouterr().out
    [line] = made.scored({0: [0.5]})
    assert line["loss"] == 0.5 and "response" not in line


def test_a_text_leaves_out_the_token_that_ends_it_and_a_uid_is_of_all_texts():
    samples = SampleTexts(decode=lambda ids: "".join(map(str, ids)), end_token_ids=frozenset({9}))
    assert [samples.text(ids) for ids in ([1, 9, 2], [1, 2, 9], [9], [])] == ["192", "12", "", ""]
    assert sample_uid("a", "b") == sample_uid("a", "b") != sample_uid("ab") and len(sample_uid("a")) == 16


def test_rows_with_the_same_texts_and_other_pictures_are_told_apart():
    samples = SampleTexts(decode=lambda ids: "text", keeper=lambda spans: [f"sha {span.key}" for span in spans])
    rows = {key: replace(row(2, 2, 2), media=(MediaSpan(0, 1, key=key),)) for key in (0, 1)}
    ranked = [replace(pair, media=rows[key].media) for key, pair in enumerate(rows_with_responses(2, 2))]
    for one, other in (
        sentence_samples(rows, {0: [0.5], 1: [0.5]}, {}, samples),
        ranked_samples(ranked, scored(2, 2).of_prompts([0, 1]), samples),
    ):
        assert (one["images"], other["images"]) == (["sha 0"], ["sha 1"]) and one["uid"] != other["uid"]
        assert one["prompt"] == other["prompt"]
