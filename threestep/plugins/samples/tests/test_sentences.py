"""Samples of step 1: transformers' own greedy responses, whatever the ranks, and no random state moved."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from threestep.plugins.samples import sentences
from threestep.plugins.samples.observer import open_samples
from threestep.plugins.samples.samples import SampleTexts, sample_uid
from threestep.plugins.samples.sentences import Drawn, GreedyDrawing, Parts, parts_of, sentence_samples
from training.utils.base.seeds import random_state
from training.utils.contracts.documents import MediaSpan
from training.utils.contracts.rollout_engine import Sampling
from training.utils.contracts.rows import SentenceRow
from training.utils.contracts.run import EvaluatedRun, HeldOutRows
from training.utils.engine.ranks.startup import Ranks
from training.utils.engine.whole_model import WholeModel
from training.utils.generation.decoding.hf import TransformersRollout

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


def test_rows_with_the_same_texts_and_other_pictures_are_told_apart():
    samples = SampleTexts(decode=lambda ids: "text", keeper=lambda spans: [f"sha {span.key}" for span in spans])
    rows = {key: replace(row(2, 2, 2), media=(MediaSpan(0, 1, key=key),)) for key in (4, 7)}
    one, other = sentence_samples(rows, {4: [0.5], 7: [0.5]}, {}, samples)
    assert (one["images"], other["images"]) == (["sha 4"], ["sha 7"]) and one["uid"] != other["uid"]
    assert one["prompt"] == other["prompt"]


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


def test_a_run_of_step_3_is_left_alone():
    nothing: Any = None
    run = EvaluatedRun({"report_samples": 8}, nothing, nothing, nothing, None, 4, None)
    assert open_samples(run) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"zero_stage": 3}, "under --zero_stage 3 no rank has whole weights"),
        ({"loss_on": "conversation"}, "with --loss_on conversation a row has no prompt"),
        ({}, "LlamaForCausalLM cannot be decoded prompts of different lengths in one batch: it counts its padding"),
    ],
)
def test_what_cannot_be_drawn_is_named(model, changes, reason, capsys, monkeypatch):
    monkeypatch.setattr(sentences, "why_not_decoded", lambda model, own, way: "it counts its padding")
    made = samples_of(model, **changes)
    assert f"samples show the loss of each row and draw no responses: {reason}" in capsys.readouterr().out
    [line] = made.scored({0: [0.5]})
    assert line["loss"] == 0.5 and "response" not in line
