"""The largest forward of a plan."""

from __future__ import annotations

from training.utils.dry_run.plan import largest_forward
from training.utils.layout.planner import forward_plan


def test_a_packed_forward_holds_as_many_tokens_as_its_sequences_could_have():
    plan = forward_plan(4, 100, 64, packed=True, ranks=2)
    assert largest_forward(plan, 4, 100, shared_by=2) == (4, 100)


def test_a_bound_in_tokens_is_kept_to_the_row_and_one_sequence_always_fits():
    bounded = forward_plan(4, 100, 64, packed=True, ranks=2, max_tokens_per_micro_batch=250)
    assert largest_forward(bounded, 4, 100) == (3, 100)
    tight = forward_plan(4, 100, 64, packed=True, ranks=2, max_tokens_per_micro_batch=50)
    assert largest_forward(tight, 4, 100) == (1, 100)


def test_padded_responses_have_rows_of_their_own():
    plan = forward_plan(4, 100, 64, packed=False, ranks=2)
    assert largest_forward(plan, 4, 100, shared_by=2) == (8, 100)
