"""Micro-batches of ranked responses, rows with the responses of others, and scores however rows are laid out."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.tiny_models import VOCABULARY, tiny_scalar_model
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import MarkedRow, ResponsesRow
from training.utils.engine.ranks.startup import Ranks
from training.utils.layout.planner import PlanSettings
from training.utils.models.flops import ComputeMeter, ModelShape
from training.utils.models.token_model import ScalarModel
from training.utils.preference import batches
from training.utils.preference.batches import (
    MismatchedRows,
    chosen_alone,
    margin_levels,
    mismatched,
    preference_batches,
    score_responses,
    train_batches,
)
from training.utils.setup.training_run import LoopSettings, TrainingRun


def ranks(world_size: int = 1, rank: int = 0) -> Ranks:
    return Ranks(rank, rank, world_size, torch.device("cpu"))


def row(row_id: int, responses: int, margins: list[float] | None = None) -> ResponsesRow:
    """`row_id` + 1 prompt tokens; responses of 1, 2, ... tokens; every response has an id of its own."""
    ids = tuple(np.full(length + 1, 10 * row_id + length, np.int32) for length in range(responses))
    given = None if margins is None else np.array(margins, np.float32)
    return ResponsesRow(row_id, np.full(row_id + 1, 5, np.int32), ids, given)


def test_a_pairs_margin_is_the_sum_of_those_between():
    assert margin_levels(row(0, 3, [0.5, 2.0])).tolist() == [2.5, 2.0, 0.0]  # the docstring's example
    assert margin_levels(row(0, 2, [0.75])).tolist() == [0.75, 0.0]
    assert margin_levels(row(0, 3)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("micro", [1, 3])
def test_margins_stay_with_their_pairs(packed, micro):
    """The responses' own ids tell which pair a margin stands at, however rows are laid out."""
    rows = [row(0, 2, [0.25]), row(1, 3, [1.0, 4.0]), row(2, 2)]
    expected = {(0, 1): 0.25, (10, 11): 1.0, (10, 12): 5.0, (11, 12): 4.0, (20, 21): 0.0}
    plan = PlanSettings(1, max_rows_per_micro_batch=micro, packed=packed, max_row_tokens=12)
    found = {}
    for batch in preference_batches(rows, range(3), plan, ranks(), pad_token_id=0, are_targets=False):
        last_ids_B = batch.ranked.rows.input_ids_NT.flatten()[batch.ranked.rows.end_B]
        for better, worse, margin in zip(
            batch.ranked.better_Q, batch.ranked.worse_Q, batch.margin_Q.tolist(), strict=True
        ):
            found[int(last_ids_B[better]), int(last_ids_B[worse])] = margin
    assert found == expected


@dataclass(frozen=True, eq=False)
class Weighed(ResponsesRow):
    """A row with a number that batches hold."""

    batched = ("weight",)

    weight: float = 0.0


@pytest.mark.parametrize("packed", [True, False])
def test_numbers_of_rows_stand_at_each_of_their_sequences(packed):
    rows = [Weighed(**vars(row(n, 1 + n % 2)), weight=float(n)) for n in range(4)]
    plan = PlanSettings(1, max_rows_per_micro_batch=3, packed=packed, max_row_tokens=12)
    batches = list(preference_batches(rows, range(4), plan, ranks(), pad_token_id=0, are_targets=True))
    assert all(batch.columns["weight"].tolist() == batch.row_B.tolist() for batch in batches)
    assert sum(len(batch.row_B) for batch in batches) == 6


def made(lengths: list[list[int]]) -> list[ResponsesRow]:
    """Row i has the prompt (i), and responses of these lengths whose tokens are 100 i + place."""
    return [
        ResponsesRow(
            i, np.array([i], np.int32), tuple(np.full(n, 100 * i + k, np.int32) for k, n in enumerate(responses))
        )
        for i, responses in enumerate(lengths)
    ]


ROWS = made([[3, 1], [2, 2, 4], [1, 5], [2, 1], [6, 1]])


def plan(packed: bool, ranks: int = 1) -> PlanSettings:
    return PlanSettings(
        ranks=ranks, max_tokens_per_micro_batch=16, max_rows_per_micro_batch=2, packed=packed, max_row_tokens=16
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("taken", [[4, 1, 0], [2, 2, 3, 1], [0, 1, 2, 3, 4]])
def test_each_sequence_is_the_response_it_says(packed, taken):
    seen = []
    for batch in preference_batches(ROWS, taken, plan(packed), ranks(), pad_token_id=9, are_targets=True):
        rows = batch.ranked.rows
        assert len(batch.row_B) == len(batch.place_B) == len(batch.tokens_B) == rows.end_B.numel()
        for sequence, (row, place) in enumerate(zip(batch.row_B, batch.place_B, strict=True)):
            of_it = rows.target_ids_M[rows.sequence_M == sequence]
            assert of_it.tolist() == ROWS[row].response_ids[place].tolist()
            assert batch.tokens_B[sequence] == len(of_it)
            seen.append((int(row), int(place)))
        # best first: a pair's better sequence has the lower place of the same row
        better, worse = batch.ranked.better_Q.numpy(), batch.ranked.worse_Q.numpy()
        assert (batch.row_B[better] == batch.row_B[worse]).all()
        assert (batch.place_B[better] < batch.place_B[worse]).all()
    assert sorted(seen) == sorted((row, place) for row in taken for place in range(len(ROWS[row].response_ids)))


@pytest.mark.parametrize("packed", [False, True])
def test_a_rank_with_nothing_to_do_has_an_empty_batch(packed):
    mine, none = (
        list(preference_batches(ROWS, [3], plan(packed, 2), ranks(2, rank), pad_token_id=9, are_targets=True))
        for rank in (0, 1)
    )
    assert len(mine) == len(none) == 1
    assert none[0].row_B.shape == none[0].place_B.shape == (0,) and none[0].ranked.better_Q.numel() == 0
    assert none[0].ranked.rows.input_ids_NT.tolist() == [[9]]


def test_any_number_of_rows_some_at_a_time():
    rows = made([[1, 2]] * 70)
    batches = list(preference_batches(rows, range(70), plan(False), ranks(), pad_token_id=9, are_targets=True))
    assert sorted(np.concatenate([batch.row_B for batch in batches]).tolist()) == sorted([*range(70), *range(70)])
    assert max(batch.row_B.max() for batch in batches[:16]) == 31  # 16 forwards of 2 rows are laid out first
    assert list(preference_batches(rows, [], plan(False), ranks(), pad_token_id=9, are_targets=True)) == []


# Ten weights a token, a head of 2, attention of width 1: 60 FLOPs a token, 12 an output, 12 a pair of tokens.
METER = ComputeMeter(ModelShape(10, 0, 2, 0, attention_width=1), peak_flops_per_second=1000.0)


def figures(packed: bool, meter: ComputeMeter | None, are_targets: bool) -> dict[str, float]:
    plan = PlanSettings(ranks=1, packed=packed)
    settings = LoopSettings(1, 1, plan, plan, eval_interval=0, pad_token_id=0, seed=0, meter=meter)
    row = ResponsesRow(0, np.array([5, 6, 7]), (np.array([8, 9]), np.array([4])))
    nothing: Any = SimpleNamespace(ranks=ranks())
    run = TrainingRun(nothing, [row], [], settings, nothing)
    return run.speed_figures(train_batches(run, [0], are_targets).work, 2.0)


def test_the_share_of_the_peak_counts_a_shared_prompt_once():
    # A prompt of 3 with responses of 2 and 1: 6 tokens, and 6 + (2 x 3 + 3) + (3 + 1) = 19 pairs; unshared 5 + 4
    # tokens and 15 + 10 pairs. Two scores, or three predicted tokens. In two seconds at a peak of 1,000.
    shared = {"train/tokens_per_second": 3.0, "train/mfu": pytest.approx((60 * 6 + 12 * 19 + 12 * 2) / 2000)}
    assert figures(packed=True, meter=METER, are_targets=False) == shared
    alone = {"train/tokens_per_second": 4.5, "train/mfu": pytest.approx((60 * 9 + 12 * 25 + 12 * 2) / 2000)}
    assert figures(packed=False, meter=METER, are_targets=False) == alone
    policy = {"train/tokens_per_second": 3.0, "train/mfu": pytest.approx((60 * 6 + 12 * 19 + 12 * 3) / 2000)}
    assert figures(packed=True, meter=METER, are_targets=True) == policy
    assert figures(packed=True, meter=None, are_targets=False) == {"train/tokens_per_second": 3.0}


def marked(prompts: str, response_tokens: int = 2) -> list[MarkedRow]:
    """A row for each letter, which is its prompt; its response names the row."""
    return [
        MarkedRow(
            i, np.array([ord(letter)], np.int32), (np.full(response_tokens, 1000 + i, np.int32),), is_good=i % 2 == 0
        )
        for i, letter in enumerate(prompts)
    ]


def partners(rows: list[MarkedRow]) -> list[int]:
    found = MismatchedRows(rows, 99)
    assert len(found) == len(rows)
    return [int(row.response_ids[0][0]) - 1000 for row in found]


def test_each_row_gives_its_response_once_where_prompts_differ():
    rows = marked("abcdefghijk")
    assert sorted(partners(rows)) == list(range(11)) and all(i != other for i, other in enumerate(partners(rows)))
    assert partners(rows) == partners(rows)
    assert partners(rows) != [(i + 1) % 11 for i in range(11)]  # neighbours are often of one prompt


def test_the_same_prompt_is_passed_over():
    rows = marked("aaaabaacd")
    for i, other in enumerate(partners(rows)):
        assert rows[i].prompt_ids[0] != rows[other].prompt_ids[0]


def test_where_all_prompts_are_equal_or_one_row_is_left():
    assert sorted(partners(marked("aaa"))) == [0, 1, 2] and partners(marked("a")) == [0]
    assert len(MismatchedRows([], 9)) == 0


def test_the_rest_of_the_row_stays_and_long_responses_are_cut():
    rows = marked("abc", response_tokens=7)
    for row, other in zip(rows, MismatchedRows(rows, 5), strict=True):
        assert other.row_id == row.row_id and other.is_good is row.is_good
        assert other.prompt_ids is row.prompt_ids and len(other.response_ids) == 1
        assert len(other.response_ids[0]) == 4  # with the prompt, 5 tokens
    assert rows[0].response_ids[0].shape == (7,)


def test_a_run_on_them():
    nothing: Any = None
    rows = marked("abcd")
    found = mismatched(TrainingRun(nothing, rows, rows[:2], nothing, nothing), 9)
    assert isinstance(found.train_rows, MismatchedRows) and len(found.eval_rows) == 2


def drawn(count: int) -> list[ResponsesRow]:
    dice = np.random.default_rng(0)

    def ids(most: int) -> np.ndarray:
        return dice.integers(3, VOCABULARY, dice.integers(1, most)).astype(np.int32)

    return [ResponsesRow(i, ids(9), tuple(ids(12) for _ in range(2 + i % 2)), None) for i in range(count)]


@pytest.fixture(scope="module")
def model():
    return tiny_scalar_model("llama")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("at_a_time", [2, 1024])
def test_scores_and_their_order(model, monkeypatch, packed, at_a_time):
    monkeypatch.setattr(batches, "_PLANNED_ROWS", at_a_time)
    plan = PlanSettings(1, 60, 2, packed, max_row_tokens=50)
    found = score_responses(ScalarModel(model), drawn(7), plan, 0, ranks=ranks())
    expected = []
    with torch.no_grad():
        for row in drawn(7):
            for response in row.response_ids:
                ids = torch.tensor(np.concatenate([row.prompt_ids, response])[None].astype(np.int64))
                expected.append(float(model.score(model.model(ids, use_cache=False)[0][0, -1])))
    assert found.score_R.tolist() == pytest.approx(expected, abs=1e-5)
    assert found.prompt_R.tolist() == [i for i, row in enumerate(drawn(7)) for _ in row.response_ids]
    assert found.tokens_R.tolist() == [len(ids) for row in drawn(7) for ids in row.response_ids]
    assert found.score_R.dtype == np.float64 and found.prompt_R.dtype == np.int64


def test_the_ranks_shares_are_put_in_order(model, monkeypatch):
    """Each of two ranks scores its share; what they gather is what one rank finds."""
    plan = PlanSettings(2, 40, 2, packed=True, max_row_tokens=40)
    parts = []
    monkeypatch.setattr(batches, "gathered", lambda part: parts.append(part) or [part])
    for rank in (1, 0):
        score_responses(ScalarModel(model), drawn(9), plan, 0, ranks=ranks(2, rank))
    assert all(0 < len(part) < 22 for part in parts)
    monkeypatch.setattr(batches, "gathered", lambda part: parts)
    together = score_responses(ScalarModel(model), drawn(9), plan, 0, ranks=ranks(2, 0))
    monkeypatch.setattr(batches, "gathered", lambda part: [part])
    alone = score_responses(ScalarModel(model), drawn(9), PlanSettings(1, 40, 2), 0, ranks=ranks())
    assert together.prompt_R.tolist() == alone.prompt_R.tolist()
    assert together.tokens_R.tolist() == alone.tokens_R.tolist()
    assert together.score_R.tolist() == pytest.approx(alone.score_R.tolist(), abs=1e-5)


def test_one_response_a_prompt_and_no_rows(model):
    none = score_responses(ScalarModel(model), [], PlanSettings(1), 0, ranks=ranks())
    assert none.score_R.shape == none.prompt_R.shape == (0,)
    both = score_responses(ScalarModel(model), drawn(4), PlanSettings(1), 0, ranks=ranks())
    chosen = score_responses(ScalarModel(model), chosen_alone(drawn(4)), PlanSettings(1, packed=True), 0, ranks=ranks())
    first = np.diff(both.prompt_R, prepend=-1) != 0
    assert chosen.score_R.tolist() == pytest.approx(both.score_R[first].tolist(), abs=1e-5)


def test_a_model_that_has_diverged():
    def read(laid_out):
        return torch.full_like(laid_out.end_B, 1.0, dtype=torch.float32) / laid_out.end_B.sub(laid_out.end_B[0])

    with pytest.raises(ThreestepError, match="^1 of 4 scores are not finite: the model has diverged"):
        score_responses(read, drawn(3)[:1] + drawn(3)[2:], PlanSettings(1), 0, ranks=ranks())
