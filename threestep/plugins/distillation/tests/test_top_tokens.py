"""Likeliest tokens by the key of a beginning: in any layout those of each sequence alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.distillation.settings import DivergenceSettings
from threestep.plugins.distillation.tests.test_teacher import SEQUENCES, plainly, sequences, teacher_of
from threestep.plugins.distillation.top_tokens import (
    LEAST_REST,
    TopTable,
    compare_top,
    keys_of,
    keys_of_rows,
    rest_of,
    sequences_of_rows,
)
from training.utils.layout.planner import PlanSettings
from training.utils.layout.trie import SequenceLayout, rank_share
from training.utils.models.token_model import PolicyModel

PLANS = [
    PlanSettings(1, None, 4, False, 0),
    PlanSettings(1, None, 2, True, 20),
    PlanSettings(1, None, 2, True, 20, least_shared_tokens=1),
]


def laid_out(plan: PlanSettings) -> list:
    return [rows for _, rows in rank_share(sequences(), SequenceLayout(plan, 0), torch.device("cpu"), with_before=True)]


@pytest.mark.parametrize("plan", PLANS, ids=["padded", "shared prompt", "shared beginnings"])
def test_a_key_is_of_the_tokens_before_a_target(plan: PlanSettings):
    by_key = {}
    for prompt, response in SEQUENCES:
        ids = [*prompt, *response]
        by_key |= {key: ids[: place + 1] for place, key in enumerate(keys_of(ids))}
    assert len(by_key) == 11  # beginnings that differ
    seen = set()
    for rows in laid_out(plan):
        for key, target in zip(keys_of_rows(rows), rows.reads()[0].tolist(), strict=True):
            seen.add((*by_key[key], target))
        for ids in sequences_of_rows(rows):
            assert any(ids == [*prompt, *response] for prompt, response in SEQUENCES)
    wanted = {
        tuple([*prompt, *response][: len(prompt) + count + 1])
        for prompt, response in SEQUENCES
        for count in range(len(response))
    }
    assert seen == wanted


@pytest.mark.parametrize("plan", PLANS, ids=["padded", "shared prompt", "shared beginnings"])
@pytest.mark.parametrize("kind", ["reverse", "forward", "js"])
def test_a_table_of_a_teacher_is_the_teacher(plan: PlanSettings, kind: str):
    settings = DivergenceSettings(kind, 0.3, 4)
    student, teacher = (tiny_causal_lm("llama", torch.float64, seed) for seed in (0, 1))
    reader, keys, parts = teacher_of(teacher, settings), [], []
    for rows in laid_out(PLANS[0]):
        keys += keys_of_rows(rows)
        parts.append([part.numpy() for part in reader.top_tokens(rows, chunk_bytes=1)])
    table = TopTable(keys, *(np.concatenate(column) for column in zip(*parts, strict=True)))
    policy, total = PolicyModel(student), torch.zeros((), dtype=torch.float64)
    for rows in laid_out(plan):
        top = table.of(keys_of_rows(rows))
        read = policy(rows, compare=lambda rows, heat, top=top: compare_top(top, settings, rows, heat))
        total = total + read.compared.total
    assert total.item() == pytest.approx(plainly(student, teacher, settings, temperature=1.0).item(), rel=1e-6)


def test_what_is_lacking_and_what_is_left():
    table = TopTable(
        [7, 3], np.array([[1], [2]], np.int32), np.array([[-0.5], [-0.1]], np.float32), np.zeros(2, np.float32)
    )
    assert table.lacks([3, 4, 7]) == [1] and len(table) == 2
    assert table.of([7, 3]).ids_Uk.tolist() == [[1], [2]]
    whole = np.log(np.array([[0.5, 0.25], [0.75, 0.25]], np.float32))
    assert rest_of(whole).tolist() == pytest.approx([math.log(0.25), math.log(LEAST_REST)])
