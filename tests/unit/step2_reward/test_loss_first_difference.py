"""The pairwise loss from the first differing token on, against hand-worked numbers and a plain loop."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from training.step2_reward.loss import LossOptions, compared_tokens, ranking_loss
from training.step2_reward.trainer import read_differing_tokens
from training.utils.contracts.rows import ResponsesRow
from training.utils.data.rows.documents import responses_document
from training.utils.layout.rows import ranked_rows
from training.utils.preference.batches import PreferenceBatch

PROMPT = [1, 2]


def compared(better: list[int], worse: list[int]) -> list[tuple[int, int]]:
    """(token of the better one, token of the worse one) for each comparison of a pair, as places in the responses."""
    ids = torch.tensor([[*PROMPT, *better, *worse]])
    begins = len(PROMPT), len(PROMPT) + len(better)
    ends = torch.tensor([begins[1] - 1, begins[1] + len(worse) - 1])
    found = compared_tokens(ids, ends, [len(better), len(worse)], torch.tensor([0]), worse_Q=torch.tensor([1]))
    assert found.share_M.sum().item() == pytest.approx(1.0) and found.end_Q.tolist() == [len(found.pair_M) - 1]
    return [
        (a - begins[0], b - begins[1]) for a, b in zip(found.better_M.tolist(), found.worse_M.tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    ("better", "worse", "places"),
    [
        ([5, 6, 7], [5, 8], [(1, 1), (2, 1)]),  # the shorter one stays at its end
        ([5, 8], [5, 6, 7], [(1, 1), (1, 2)]),
        ([5, 6], [7, 6], [(0, 0), (1, 1)]),
        ([5, 6, 9], [5, 7, 9], [(1, 1), (2, 2)]),  # equal again: what came before differs
        ([5, 6], [5, 6, 7, 8], [(1, 2), (1, 3)]),  # cut: the beginning of the other
        ([5], [6], [(0, 0)]),
    ],
)
def test_from_the_first_difference_to_the_end_of_the_longer(better, worse, places):
    assert compared(better, worse) == places


def batch_of(rows: list[ResponsesRow], shared: bool) -> PreferenceBatch:
    ranked = ranked_rows([[responses_document(row, False)] for row in rows], shared, pad_token_id=0)
    tokens = [len(ids) for row in rows for ids in row.response_ids]
    count = np.arange(len(tokens))
    return PreferenceBatch(ranked, count, count, np.array(tokens), torch.zeros(len(ranked.better_Q)), count == 0)


def row(number: int, *responses: list[int]) -> ResponsesRow:
    return ResponsesRow(number, np.array(PROMPT, np.int32), tuple(np.array(ids, np.int32) for ids in responses), None)


def scores_by_token(rows, at):
    """A model whose score at a token is its id / 10."""
    assert at == "targets"
    return rows.input_ids_NT.flatten()[rows.predictor_M].float() / 10


@pytest.mark.parametrize("shared", [True, False])
def test_the_loss_by_hand(shared):
    """[5 6 7] over [5 8]: gaps 0.6 - 0.8 and 0.7 - 0.8, their mean; [9] over [3]: 0.9 - 0.3. Two prompts a step."""
    read = read_differing_tokens(scores_by_token, batch_of([row(0, [5, 6, 7], [5, 8]), row(1, [9], [3])], shared))
    loss = ranking_loss(
        read.better_M, read.worse_M, read.margin_M, read.weight_M, prompts_in_step=2.0, options=LossOptions()
    )
    by_hand = [math.log1p(math.exp(-gap)) for gap in (-0.2, -0.1, 0.6)]
    assert loss.item() == pytest.approx(((by_hand[0] + by_hand[1]) / 2 + by_hand[2]) / 2)
    assert (read.better_M > read.worse_M)[read.end_Q].tolist() == [False, True]


def test_micro_batches_and_layouts_add_up_to_a_plain_loop():
    """Ranked responses too: each of their pairs has its share of the prompt."""
    dice = random.Random(0)
    rows = [
        row(
            number,
            *([dice.randint(3, 6) for _ in range(dice.randint(1, 5))] + [10 + place] for place in range(responses)),
        )
        for number, responses in enumerate((2, 3, 2, 4))
    ]

    def loss(part: list[ResponsesRow], shared: bool) -> float:
        read = read_differing_tokens(scores_by_token, batch_of(part, shared))
        weights = read.weight_M.double()
        found = ranking_loss(
            read.better_M.double(),
            read.worse_M.double(),
            read.margin_M,
            weights,
            prompts_in_step=4.0,
            options=LossOptions(),
        )
        return found.item()

    plain = 0.0
    for each in rows:
        texts = [ids.tolist() for ids in each.response_ids]
        pairs = [(i, j) for i in range(len(texts)) for j in range(i + 1, len(texts))]
        for i, j in pairs:
            longest = max(len(texts[i]), len(texts[j]))
            one, other = ([text[min(t, len(text) - 1)] for t in range(longest)] for text in (texts[i], texts[j]))
            first = next(t for t in range(longest) if texts[i][: t + 1] != texts[j][: t + 1])
            gaps = [(one[t] - other[t]) / 10 for t in range(first, longest)]
            plain += sum(math.log1p(math.exp(-gap)) for gap in gaps) / len(gaps) / len(pairs) / 4
    for shared in (True, False):
        assert loss(rows, shared) == pytest.approx(plain, rel=1e-6)
        assert sum(loss([each], shared) for each in rows) == pytest.approx(plain, rel=1e-6)
    assert loss([], True) == 0.0
