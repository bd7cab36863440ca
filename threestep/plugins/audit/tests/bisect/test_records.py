"""Records of a step of two runs: the row, the rank, the token and the layer that differ first."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from threestep.plugins.audit.bisect.records import Located, TracedRecord, locate
from threestep.plugins.audit.recording.files import RecordHead, StepRecord
from threestep.plugins.audit.recording.schema import TRACED

pytestmark = pytest.mark.unit


def rank(rows: list[int]) -> dict[str, np.ndarray]:
    """A rank's sequences of three tokens."""
    ids = np.concatenate([np.array([row, row + 1, row + 2]) for row in rows])
    return {
        "lengths": np.full(len(rows), 3),
        "rows": np.array(rows),
        "token_ids": ids,
        "loss_mask": ids % 3 > 0,
        "logprobs": -ids / 8.0,
        "advantages": ids * 1.0,
    }


def layers(ranks: int) -> dict[str, list[dict[str, Any]]]:
    table = {part: {name: ["0f", 1.0, 4.0] for name in ("model.layers.0.up", "model.layers.1.up")} for part in TRACED}
    return {"train": [copy.deepcopy(table) for _ in range(ranks)]}


def record(*ranks: list[int], **figures: float) -> TracedRecord:
    head = RecordHead("sft", 3, ranks=len(ranks), figures={"loss": 2.0, "grad_norm": 1.0, **figures})
    return TracedRecord(StepRecord(head, [rank(rows) for rows in ranks]), layers(len(ranks)))


def first(a: TracedRecord, b: TracedRecord, bound: float = 0.0) -> Located:
    return locate(a, b, bound)[0]


def test_equal_records_on_other_ranks():
    assert locate(record([6, 9], [30]), record([6, 9], [30]), 0.0) == []
    one, two = record([30, 6, 9]), record([6, 9], [30])
    halves = {part: {name: ["0f", 1.0, 4.0] for name in table} for part, table in two.layers["train"][0].items()}
    whole = {part: {name: ["1e", 2.0, 8.0] for name in table} for part, table in halves.items()}
    assert locate(replace(one, layers={"train": [whole]}), two, 1e-5) == []


def test_a_row():
    found = first(record([6, 9], [30]), record([6, 9], [33]))
    assert found == Located("data", "rows", "row 30 (rank 1)", "row 30 (rank 1)", "row 33 (rank 1)", 1, 3, "sequences")


@pytest.mark.parametrize(
    ("name", "part"), [("token_ids", "data"), ("loss_mask", "data"), ("advantages", "data"), ("logprobs", "forward")]
)
def test_a_token(name: str, part: str):
    a, b = record([6, 9], [30]), record([6, 9], [30])
    own = b.record.ranks[1][name]
    own[1] = not own[1] if own.dtype == bool else own[1] + 1
    found = first(a, b)
    assert (found.part, found.name, found.where) == (part, name, "row 30 (rank 1), token 1")
    assert (found.differing, found.of) == (1, 9)


def test_a_token_of_another_rank_names_both():
    a, b = (replace(each, layers={}) for each in (record([6, 9, 30]), record([6, 9], [30])))
    b.record.ranks[1]["token_ids"][2] += 1
    assert first(a, b, 1e-5).where == "row 30 (rank 0 and 1), token 2"


def test_a_length():
    a, b = record([6]), record([6])
    for name in ("token_ids", "loss_mask", "logprobs", "advantages"):
        b.record.ranks[0][name] = b.record.ranks[0][name][:2]
    b.record.ranks[0]["lengths"] = np.array([2])
    found = first(a, b)
    assert (found.where, found.a, found.b) == ("row 6 (rank 0), token 2", "3 tokens", "2 tokens")


def test_layers_come_in_the_order_of_the_data():
    a, b = record([6], [9]), record([6], [9])
    b.layers["train"][1]["forward"]["model.layers.1.up"][0] = "10"
    b.layers["train"][1]["weights before"]["model.layers.0.up"][0] = "10"
    b.record.ranks[0]["logprobs"][0] += 1
    found = locate(a, b, 0.0)
    assert [(each.part, each.name) for each in found] == [
        ("weights", "weights before"), ("forward", "output"), ("forward", "logprobs"),
    ]  # fmt: skip
    assert found[0].where == "layers.0.up" and found[1].where == "layers.1.up (rank 1)"


def test_the_norm_of_gradients_comes_after_them_and_the_weights_last():
    a, b = record([6]), record([6], grad_norm=1.5, learning_rate=0.1)
    for part in ("backward", "gradient of a rank", "gradient", "weights after"):
        b.layers["train"][0][part]["model.layers.0.up"][0] = "10"
    assert [each.name for each in locate(a, b, 0.0)] == [
        "gradient of the output", "gradient of the weight", "grad_norm", "gradient, in Adam's first moment",
        "learning_rate", "weights after",
    ]  # fmt: skip


def test_a_denominator_comes_before_the_loss():
    a, b = record([6], denominator=20.0), record([6], loss=1.5, denominator=24.0)
    assert [(each.part, each.name) for each in locate(a, b, 0.0)] == [("forward", "denominator"), ("forward", "loss")]


def test_a_weight_that_is_frozen_in_one_run():
    a, b = record([6], [9]), record([6], [9], grad_norm=1.5)
    for table in b.layers["train"]:
        for part in ("weights before", "gradient of a rank", "gradient", "weights after"):
            del table[part]["model.layers.1.up"]
    found = locate(a, b, 0.0)
    assert [(each.name, each.where) for each in found] == [
        ("gradient of the weight", "layers.1.up (rank 0)"), ("grad_norm", "the whole step"),
    ]  # fmt: skip
    assert (found[0].a, found[0].b, found[0].differing, found[0].of) == ("norm 2, sum 1", "none", 1, 2)
    assert [each.b for each in locate(b, a, 0.0)] == ["norm 2, sum 1", "1"]
    for table in b.layers["train"]:
        table["gradient of a rank"].clear()  # of another version, say, which writes none
    assert [each.name for each in locate(a, b, 0.0)] == ["grad_norm"]


def test_rounding_is_below_the_bound():
    a, b = record([6]), record([6])
    b.record.ranks[0]["logprobs"] += 1e-6
    b.layers["train"][0]["forward"]["model.layers.1.up"][:2] = ["10", 1.0 + 1e-6]
    assert locate(a, b, 1e-5) == [] != locate(a, b, 0.0)
    b.layers["train"][0]["forward"]["model.layers.1.up"][1] = 1.1
    assert [each.where for each in locate(a, b, 1e-5)] == ["layers.1.up"]


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("bound", [0.0, 1e-5, 0.5])
def test_a_number_that_is_not_finite_differs_from_one_that_is(bad: float, bound: float):
    a, b = record([6]), record([6], loss=bad)
    b.record.ranks[0]["logprobs"][1] = b.record.ranks[0]["advantages"][2] = bad
    b.layers["train"][0]["forward"]["model.layers.1.up"][:] = ["10", bad, 4.0]
    b.layers["train"][0]["weights after"]["model.layers.0.up"][:] = ["10", 1.0, abs(bad)]
    names = {"logprobs", "advantages", "output", "weights after", "loss"}
    assert {each.name for each in locate(a, b, bound)} == {each.name for each in locate(b, a, bound)} == names
    assert locate(b, copy.deepcopy(b), bound) == []


def responses(moved: float = 0.0) -> TracedRecord:
    own = {
        "rollout_numbers": np.array([4, 5]),
        "rollout_lengths": np.array([2, 1]),
        "rollout_scores": np.array([1.0, 2.0]),
        "rollout_rewards": np.array([0.0, 1.0, 2.0 + moved]),
        "rollout_ended": np.array([True, False]),
    }
    return TracedRecord(StepRecord(RecordHead("policy", 2), [own]), {})


def test_a_response_of_a_rollout():
    found = first(responses(), responses(0.5))
    assert found == Located("rollout", "rewards", "response 5 (rank 0)", "2", "2.5", 1, 2, "responses")
