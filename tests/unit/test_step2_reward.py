"""Step 2: its flags; the ranking loss, -log sigmoid(better - worse), prompts counted alike; and the pairwise loss from
the first differing token on, against hand-worked numbers and a plain loop."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.step2_reward.arguments import RewardModelArguments, check_margins, check_sharing
from training.step2_reward.loss import LossOptions, compared_tokens, ranking_loss
from training.step2_reward.main import main
from training.step2_reward.trainer import read_differing_tokens
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.rows import ResponsesRow
from training.utils.data.rows.documents import responses_document
from training.utils.engine.config.arguments import EngineArguments
from training.utils.flags.flags import note_mistakes
from training.utils.layout.rows import ranked_rows
from training.utils.preference.batches import PreferenceBatch


def sentences(**given) -> list[str]:
    mistakes = Mistakes()
    note_mistakes(RewardModelArguments(**given), mistakes)
    return mistakes.sentences


def test_the_defaults_are_sound():
    assert sentences() == []


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"learning_rate": 0.0}, "--learning_rate expects more than 0, got 0.0"),
        ({"margin_scale": -1.0}, "--margin_scale expects 0 or more, got -1.0"),
        ({"center_coef": -0.1}, "--center_coef expects 0 or more, got -0.1"),
        ({"normalization_rows": -1}, "--normalization_rows expects 0 or more, got -1"),
        (
            {"label_smoothing": 0.5},
            "--label_smoothing expects 0 or more and less than 0.5, got 0.5",
        ),
    ],
)
def test_a_setting_that_cannot_be(given, sentence):
    assert sentences(**given) == [sentence]


def test_margins_that_are_asked_for_must_be_there():
    ids = np.ones(1, np.int32)
    without, without_too = ResponsesRow(0, ids, (ids, ids)), ResponsesRow(1, ids, (ids, ids, ids))
    check_margins([without], RewardModelArguments())
    check_margins([without, ResponsesRow(1, ids, (ids, ids), np.zeros(1))], RewardModelArguments(margin_scale=0.5))
    with pytest.raises(ThreestepError, match="--margin_scale 0.5 needs margins, but no training row.*--margin_col"):
        check_margins([without, without_too], RewardModelArguments(margin_scale=0.5))


@pytest.mark.needs_plugin("embedded")
def test_a_reward_model_has_no_chunks_of_logits():
    with pytest.raises(
        ThreestepError, match="--head_chunk_mb 4 applies to a language model's output layer, which a rew"
    ):
        main(["--model_name_or_path", "m", "--data_path", "embedded", "--head_chunk_mb", "4"])


def test_tokens_compared_one_by_one_stand_in_one_piece():
    def flags(shared: int, loss_from: str) -> Any:
        own = RewardModelArguments(loss_from=loss_from)
        return SimpleNamespace(engine=EngineArguments(share_beginnings=shared), of_step=own)

    check_sharing(flags(64, "end"))
    check_sharing(flags(0, "first_difference"))
    with pytest.raises(ThreestepError, match="--loss_from first_difference needs .* --share_beginnings 64 may split"):
        check_sharing(flags(64, "first_difference"))


pairs = st.lists(st.tuples(st.floats(-30, 30), st.floats(-30, 30), st.floats(0, 1)), min_size=1, max_size=20)


def plain_loss(better_Q, worse_Q, weight_Q, prompts_in_step):
    return ranking_loss(
        better_Q, worse_Q, torch.zeros_like(worse_Q), weight_Q, prompts_in_step=prompts_in_step, options=LossOptions()
    )


def test_by_hand():
    # Equal scores: -log(1/2). A gap of log 3: -log(3/4). Weights 1 and 1/2, two prompts in the step.
    better_Q = torch.tensor([0.7, math.log(3)], requires_grad=True)
    loss = plain_loss(better_Q, torch.tensor([0.7, 0.0]), torch.tensor([1.0, 0.5]), 2)
    assert loss.item() == pytest.approx((math.log(2) + 0.5 * math.log(4 / 3)) / 2)
    loss.backward()  # -sigmoid(worse - better) x weight / prompts: -1/2 x 1 / 2, -1/4 x 1/2 / 2
    torch.testing.assert_close(better_Q.grad, torch.tensor([-0.25, -0.0625]))


@settings(max_examples=50, deadline=None)
@given(pairs)
def test_against_the_naive_formula(pairs):
    better_Q, worse_Q, weight_Q = (torch.tensor(column) for column in zip(*pairs, strict=True))
    expected = sum(
        weight * math.log1p(math.exp(worse - better)) for better, worse, weight in zip(
            better_Q.tolist(), worse_Q.tolist(), weight_Q.tolist(), strict=True
        )
    ) / 7  # fmt: skip
    assert plain_loss(better_Q, worse_Q, weight_Q, 7).item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_wide_gap_does_not_overflow():
    """log(1 + exp(x)) does, from a gap of 89 on in float32."""
    better_Q = torch.tensor([-500.0, 500.0], requires_grad=True)
    loss = plain_loss(better_Q, torch.zeros(2), torch.ones(2), 1)
    assert loss.item() == 500.0
    loss.backward()
    assert better_Q.grad.tolist() == [-1.0, 0.0]


@settings(max_examples=50, deadline=None)
@given(pairs, st.lists(st.integers(0, 20), max_size=4))
def test_parts_add_up_to_the_whole(pairs, cuts):
    columns = [torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True)]
    edges = [0, *sorted(min(cut, len(pairs)) for cut in cuts), len(pairs)]
    parts = [plain_loss(*(column[a:b] for column in columns), 5).item() for a, b in zip(edges, edges[1:], strict=False)]
    assert sum(parts) == pytest.approx(plain_loss(*columns, 5).item(), rel=1e-12)


def test_no_pairs_give_zero_on_the_graph():
    scores = torch.zeros(3, requires_grad=True)
    loss = plain_loss(scores[:0], scores[:0], torch.ones(0), 5)
    loss.backward()
    assert loss.item() == 0 and scores.grad.tolist() == [0, 0, 0]


# better 1.5 and 0, worse 0.5 and 1, margins 2 and 0: gaps 1 and -1; weights 1 and 1/2, two prompts.
BETTER, WORSE, MARGIN, WEIGHT = [1.5, 0.0], [0.5, 1.0], [2.0, 0.0], [1.0, 0.5]


def by_hand(options: LossOptions) -> tuple[float, list[float]]:
    """(loss, its gradient for better_Q)."""
    better_Q = torch.tensor(BETTER, dtype=torch.float64, requires_grad=True)
    worse_Q, margin_Q, weight_Q = (torch.tensor(column, dtype=torch.float64) for column in (WORSE, MARGIN, WEIGHT))
    loss = ranking_loss(better_Q, worse_Q, margin_Q, weight_Q, prompts_in_step=2.0, options=options)
    loss.backward()
    return loss.item(), better_Q.grad.tolist()


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


# A gap h costs -log sigmoid(h) = softplus(-h), with the slope -sigmoid(-h). Of both pairs by hand.
PLAIN = [softplus(-1.0), softplus(1.0)], [-sigmoid(-1.0), -sigmoid(1.0)]
OPTIONED = [
    ({}, *PLAIN),
    # h = gap - margin_scale x margin: 1 - 0.25 x 2 = 0.5, and -1.
    ({"margin_scale": 0.25}, [softplus(-0.5), softplus(1.0)], [-sigmoid(-0.5), -sigmoid(1.0)]),
    # Cross-entropy with a soft label: 0.9 of -log sigmoid(h) and 0.1 of -log sigmoid(-h); slope sigmoid(h) - 0.9.
    (
        {"label_smoothing": 0.1},
        [0.9 * softplus(-1.0) + 0.1 * softplus(1.0), 0.9 * softplus(1.0) + 0.1 * softplus(-1.0)],
        [sigmoid(1.0) - 0.9, sigmoid(-1.0) - 0.9],
    ),
    # The square of the sum of both scores, 2 and 1: 0.01 x 4 and 0.01 x 1 on top, slopes 0.01 x 2 x the sum.
    ({"center_coef": 0.01}, [PLAIN[0][0] + 0.04, PLAIN[0][1] + 0.01], [PLAIN[1][0] + 0.04, PLAIN[1][1] + 0.02]),
    # All at once: h = 1 - 2 and -1 - 0.
    (
        {"margin_scale": 1.0, "label_smoothing": 0.2, "center_coef": 0.5},
        [0.8 * softplus(1.0) + 0.2 * softplus(-1.0) + 0.5 * square for square in (4, 1)],
        [sigmoid(-1.0) - 0.8 + 2 * 0.5 * own for own in (2, 1)],
    ),
]


@pytest.mark.parametrize(
    ("options", "losses", "slopes"), OPTIONED, ids=["none", "margins", "smoothing", "centring", "all"]
)
def test_options_by_hand(options, losses, slopes):
    loss, gradient = by_hand(LossOptions(**options))
    assert loss == pytest.approx((losses[0] + 0.5 * losses[1]) / 2)
    assert gradient == pytest.approx([slopes[0] / 2, 0.5 * slopes[1] / 2])


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
