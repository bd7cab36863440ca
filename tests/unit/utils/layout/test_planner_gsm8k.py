"""The planner's balance on the texts of GSM8K and of the embedded task: 64 sequences a step, 8 ranks."""

from __future__ import annotations

import json
import os
import random
import statistics
from pathlib import Path

import pytest

from tests.support.tiny_tokenizers import train_tokenizer
from threestep.plugins.embedded.task import generate
from training.utils.layout.order import ShuffledStream
from training.utils.layout.planner import forward_plan, plan_step

ROOT = Path(__file__).parents[4]
SHARED = Path(os.environ.get("THREESTEP_SHARED_DATA", ROOT.parent / "shared" / "data")) / "gsm8k"
TRAIN = SHARED / "train.jsonl"
RANKS, SEQUENCES, STEPS = 8, 64, 30


@pytest.fixture(scope="module", params=["embedded", "gsm8k"])
def lengths(request) -> list[int]:
    """Tokens of 1,920 questions with their answers, by a byte-level BPE of 2,000 tokens trained on 500 of them."""
    if request.param == "embedded":
        texts = [row.prompt + row.chosen for row in generate(7, STEPS * SEQUENCES, 0)["train"]]
    else:
        if not TRAIN.is_file():
            pytest.skip(f"needs GSM8K's train.jsonl, and {TRAIN} is missing (THREESTEP_SHARED_DATA names its folder)")
        rows = [json.loads(line) for line in TRAIN.read_text(encoding="utf-8").splitlines()]
        rows = random.Random(0).sample(rows, STEPS * SEQUENCES)
        texts = [f"Human: {row['question']} Assistant: {row['answer']}" for row in rows]
    tokenizer = train_tokenizer(texts[:500], vocab_size=2000)
    return [min(512, len(ids) + 1) for ids in tokenizer(texts)["input_ids"]]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("max_tokens", [None, 1024])
def test_the_fullest_rank_is_at_most_2_percent_over_the_mean(lengths: list[int], max_tokens: int | None, packed: bool):
    plan = forward_plan(SEQUENCES // RANKS, 512, 512, packed=packed, ranks=RANKS, max_tokens_per_micro_batch=max_tokens)
    order = ShuffledStream(len(lengths), seed=1).take(0, len(lengths))
    over = []
    for start in range(0, len(order), SEQUENCES):
        step = [lengths[index] for index in order[start : start + SEQUENCES]]
        planned = plan_step(step, plan)
        tokens = [sum(step[index] for rows in rank for row in rows for index in row) for rank in planned]
        assert sum(tokens) == sum(step)
        over.append(max(tokens) / statistics.mean(tokens) - 1.0)
    assert len(over) == STEPS and max(over) <= 0.02
    # Dealt in turn instead, as samplers do, the fullest rank has far more: the texts are not all alike.
    first = [lengths[index] for index in order[:SEQUENCES]]
    in_turn = [sum(first[rank::RANKS]) for rank in range(RANKS)]
    assert max(in_turn) / statistics.mean(in_turn) > 1.05
