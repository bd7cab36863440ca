"""Scores of responses, however they are laid out, are those of each sentence alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.tiny_models import VOCABULARY, tiny_scalar_model
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import ResponsesRow
from training.utils.engine.ranks.startup import Ranks
from training.utils.layout.planner import PlanSettings
from training.utils.models.token_model import ScalarModel
from training.utils.preference import batches
from training.utils.preference.batches import chosen_alone, score_responses

ALONE = Ranks(0, 0, 1, torch.device("cpu"))


def rows(count: int) -> list[ResponsesRow]:
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
    found = score_responses(ScalarModel(model), rows(7), plan, 0, ranks=ALONE)
    expected = []
    with torch.no_grad():
        for row in rows(7):
            for response in row.response_ids:
                ids = torch.tensor(np.concatenate([row.prompt_ids, response])[None].astype(np.int64))
                expected.append(float(model.score(model.model(ids, use_cache=False)[0][0, -1])))
    assert found.score_R.tolist() == pytest.approx(expected, abs=1e-5)
    assert found.prompt_R.tolist() == [i for i, row in enumerate(rows(7)) for _ in row.response_ids]
    assert found.tokens_R.tolist() == [len(ids) for row in rows(7) for ids in row.response_ids]
    assert found.score_R.dtype == np.float64 and found.prompt_R.dtype == np.int64


def test_no_rows(model):
    found = score_responses(ScalarModel(model), [], PlanSettings(1), 0, ranks=ALONE)
    assert found.score_R.shape == found.prompt_R.shape == (0,)


def test_the_ranks_shares_are_put_in_order(model, monkeypatch):
    """Each of two ranks scores its share; what they gather is what one rank finds."""
    plan = PlanSettings(2, 40, 2, packed=True, max_row_tokens=40)
    parts = []
    monkeypatch.setattr(batches, "gathered", lambda part: parts.append(part) or [part])
    for rank in (1, 0):
        score_responses(ScalarModel(model), rows(9), plan, 0, ranks=Ranks(rank, rank, 2, torch.device("cpu")))
    assert all(0 < len(part) < 22 for part in parts)
    monkeypatch.setattr(batches, "gathered", lambda part: parts)
    together = score_responses(ScalarModel(model), rows(9), plan, 0, ranks=Ranks(0, 0, 2, torch.device("cpu")))
    monkeypatch.setattr(batches, "gathered", lambda part: [part])
    alone = score_responses(ScalarModel(model), rows(9), PlanSettings(1, 40, 2), 0, ranks=ALONE)
    assert together.prompt_R.tolist() == alone.prompt_R.tolist()
    assert together.tokens_R.tolist() == alone.tokens_R.tolist()
    assert together.score_R.tolist() == pytest.approx(alone.score_R.tolist(), abs=1e-5)


def test_one_response_a_prompt(model):
    both = score_responses(ScalarModel(model), rows(4), PlanSettings(1), 0, ranks=ALONE)
    chosen = score_responses(ScalarModel(model), chosen_alone(rows(4)), PlanSettings(1, packed=True), 0, ranks=ALONE)
    first = np.diff(both.prompt_R, prepend=-1) != 0
    assert chosen.score_R.tolist() == pytest.approx(both.score_R[first].tolist(), abs=1e-5)


def test_a_model_that_has_diverged():
    def read(laid_out):
        return torch.full_like(laid_out.end_B, 1.0, dtype=torch.float32) / laid_out.end_B.sub(laid_out.end_B[0])

    with pytest.raises(ThreestepError, match="^1 of 4 scores are not finite: the model has diverged"):
        score_responses(read, rows(3)[:1] + rows(3)[2:], PlanSettings(1), 0, ranks=ALONE)
