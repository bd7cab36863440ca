"""The largest forward of a plan."""

from __future__ import annotations

import pytest

from threestep.plugins.plan.dry_run.plan import rows_at_most
from training.utils.layout.planner import forward_plan


def test_a_packed_forward_holds_as_many_tokens_as_its_sequences_could_have():
    assert rows_at_most(4, 100, True, None, shared_by=2) == 4
    assert forward_plan(4, 100, 64, packed=True, ranks=2).max_tokens_per_micro_batch == 4 * 100


@pytest.mark.parametrize(("bound", "rows"), [(250, 3), (50, 1)])
def test_a_bound_in_tokens_is_kept_to_the_row_and_one_sequence_always_fits(bound, rows):
    for packed in (True, False):
        assert rows_at_most(4, 100, packed, bound) == rows
        plan = forward_plan(4, 100, 64, packed=packed, ranks=2, max_tokens_per_micro_batch=bound)
        assert plan.max_tokens_per_micro_batch == bound


def test_padded_responses_have_rows_of_their_own():
    assert rows_at_most(4, 100, False, None, shared_by=2) == 8
    assert forward_plan(4, 100, 64, packed=False, ranks=2).max_tokens_per_micro_batch is None
