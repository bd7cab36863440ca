"""A record's ranks as one, and the names of places."""

from __future__ import annotations

import numpy as np
import pytest

from threestep.plugins.audit.quantities.step import AuditedStep, LackingError
from threestep.plugins.audit.recording.files import RecordHead, StepRecord

pytestmark = pytest.mark.unit


@pytest.fixture
def step() -> AuditedStep:
    """Two ranks: sequences of 2 and 1 tokens in two micro-batches; one of 3 tokens in one."""
    first = {
        "lengths": np.array([2, 1]), "rows": np.array([4, 9]), "micro_batches": np.array([0, 1]),
        "token_ids": np.array([5, 6, 7]), "chosen": np.array([0]), "rejected": np.array([1]),
        "loss_mask": np.array([False, True, True]), "micro_losses": np.zeros(2, np.float32),
    }  # fmt: skip
    second = {
        "lengths": np.array([3, 2]), "rows": np.array([1, 2]), "micro_batches": np.array([0, 0]),
        "token_ids": np.arange(5), "chosen": np.array([1]), "rejected": np.array([0]),
        "loss_mask": np.ones(5, dtype=bool), "micro_losses": np.zeros(1, np.float32),
    }  # fmt: skip
    return AuditedStep(StepRecord(RecordHead("sft", 1, 2, {"beta": 0.1}), [first, second]), {"beta": 0.2})


def test_ranks_are_joined(step):
    assert step.setting("beta") == 0.2 and (step.ranks, step.micro_batches) == (2, 3)
    assert step.sequence_T.tolist() == [0, 0, 1, 2, 2, 2, 3, 3] and step.place_T.tolist() == [0, 1, 0, 0, 1, 2, 0, 1]
    assert step.micro_S.tolist() == [0, 1, 2, 2] and step.rank_S.tolist() == [0, 0, 1, 1]
    assert step.tensor("chosen").tolist() == [0, 3] and step.tensor("rejected").tolist() == [1, 2]
    units = step.token_units(np.ones(8))
    assert units.weights_U.tolist() == [0, 1, 1, 1, 1, 1, 1, 1] and units.micro_U.tolist() == [0, 0, 1, 2, 2, 2, 2, 2]


def test_places_have_names(step):
    assert step.where("T", 4) == "row 1 of rank 1, token 1 (token id 1)"
    assert step.where("S", 1) == "row 9 of rank 0"
    assert step.where("P", 1) == "the pair of row 2 of rank 1 and its rejected response"
    assert [step.where("K", index) for index in range(3)] == [
        "micro-batch 0 of rank 0", "micro-batch 1 of rank 0", "micro-batch 0 of rank 1",
    ]  # fmt: skip


def test_what_is_missing_is_named(step):
    for call, name in (
        (step.tensor, "scores"),
        (step.setting, "gamma"),
        (step.figure, "loss"),
        (step.state, "gradients."),
    ):
        with pytest.raises(LackingError, match=name):
            call(name)
