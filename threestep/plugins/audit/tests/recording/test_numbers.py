"""Numbers of a record that no step has are refused, each by its name."""

from __future__ import annotations

import numpy as np
import pytest

from threestep.plugins.audit.recording.numbers import check_state, check_tensors
from training.utils.base.errors import ThreestepError

WHOLE = {
    "lengths": np.array([2, 3]), "token_ids": np.arange(5), "chosen": np.array([0]), "rejected": np.array([1]),
    "micro_batches": np.array([0, 1]), "micro_losses": np.zeros(2),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("lengths", [-1, 6], "lengths expects numbers from 0 to 5, got -1"),
        ("lengths", [2, 2**62], "lengths expects numbers from 0 to 5, got 4,611,686,018,427,387,904"),
        ("token_ids", [0, 1, 2, 3, -1], "token_ids expects numbers from 0"),
        ("chosen", [2], "chosen expects numbers from 0 to 1, got 2"),
        ("rejected", [-1], "rejected expects numbers from 0 to 1, got -1"),
        ("micro_batches", [0, 2], "micro_batches expects numbers from 0 to 1, got 2"),
    ],
)
def test_counts_and_places_are_within_what_they_are_of(name, values, sentence):
    check_tensors(WHOLE, "rank0")
    with pytest.raises(ThreestepError, match=f"rank0: {sentence}"):
        check_tensors({**WHOLE, name: np.array(values)}, "rank0")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"exp_avg.a": np.zeros(2)},
            r"state: exp_avg.a expects the shape \[3\], as others of the parameter, got \[2\]",
        ),
        ({"exp_avg.b": np.zeros(3)}, r"state: exp_avg.b expects the shape none"),
        ({"weights_before.a": np.zeros(4)}, r"state: weights_before.a expects the shape \[3\]"),
        ({"gradients.a": np.zeros(3, dtype=np.int64)}, "gradients.a expects floating-point numbers, got int64"),
        ({"moments.a": np.zeros(3)}, "state expects names that begin with gradients., .*got 'moments.a'"),
    ],
)
def test_a_parameter_is_the_same_in_all_parts_of_a_state(change, sentence):
    kinds = ("gradients.", "exp_avg.", "weights_before.", "critic_gradients.")
    state = {f"{kind}a": np.zeros(3) for kind in kinds} | {"weights_before.frozen": np.zeros(7)}
    check_state(state, "state")
    with pytest.raises(ThreestepError, match=sentence):
        check_state({**state, **change}, "state")
