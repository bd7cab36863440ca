"""--share_trunk trains what two separate models with the same weights train, and keeps their trunk once."""

from __future__ import annotations

import pytest

from tests.invariants import shared_trunk_program as program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # on a busy machine


EVERY = [
    pytest.param((size, case), marks=[] if case in program.ORDINARY[size] else [pytest.mark.long])
    for size in (1, 2)
    for case in program.CASES
]


@pytest.fixture(params=EVERY, ids=str)
def found(request, launched):
    """The reports of all ranks on one case."""
    size, case = request.param
    _, reports = launched("shared_trunk_program", size)
    return [{**report[case], "dtype": program.CASES[case].dtype} for report in reports]


def test_it_learns_what_two_separate_models_learn(found):
    """Log-probabilities, the reference's, values and every figure of four updates: the sums are the same ones, so to
    the last bit."""
    for report in found:
        assert report["apart"] == [0.0, 0.0] and report["figures"]
        assert report["moved"]["reference"] == 0.0
        assert report["moved"]["actor"] > 0.01 and report["moved"]["critic"] > 0.01


def test_the_trunk_is_in_memory_once(found):
    for report in found:
        shared, apart = report["weights"]["shared"], report["weights"]["apart"]
        assert shared["in_memory"] == shared["frozen"] + shared["trainable"]
        assert apart["in_memory"] - shared["in_memory"] == shared["common"] > shared["frozen"] / 2
        assert apart["common"] == 0 and apart["trainable"] == shared["trainable"]


def test_an_update_of_one_role_leaves_the_other_alone(found):
    for report in found:
        moved = report["one_at_a_time"]
        assert moved["actor_moves_critic"] == moved["critic_moves_actor"] == 0.0
        assert moved["actor_moves_actor"] > 1e-4 and moved["critic_moves_critic"] > 1e-4


def test_the_critic_that_is_saved_scores_in_plain_transformers(found):
    """In bfloat16 attention of short rows is computed in float32 here and in bfloat16 there: scores near 1 then differ
    by a few of their last bits, 2**-8 each. That the merge is right is shown in float32."""
    assert found[0]["merged"] < (2**-6 if found[0]["dtype"] == "bf16" else 1e-5)
