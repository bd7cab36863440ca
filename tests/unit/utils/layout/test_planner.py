"""The batch planner: exact numbers of sequences, whatever their lengths, ranks and bounds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from training.utils.layout.planner import PlanSettings, StepPlan, plan_step

lengths = st.lists(st.integers(1, 600), max_size=60)
plans = st.builds(PlanSettings, st.integers(1, 5), st.integers(1, 9), st.none() | st.integers(1, 2000))


@settings(max_examples=200, deadline=None)
@given(lengths, plans)
def test_every_sequence_is_computed_exactly_once(lengths, plan):
    step = plan_step(lengths, plan)
    planned = [index for rank in step.micro_batches for batch in rank for index in batch]
    assert sorted(planned) == list(range(len(lengths)))


@settings(max_examples=200, deadline=None)
@given(lengths, plans)
def test_ranks_have_as_many_micro_batches_and_bounds_hold(lengths, plan):
    step = plan_step(lengths, plan)
    assert len(step.micro_batches) == plan.ranks
    assert {len(rank) for rank in step.micro_batches} == {step.micro_batches_per_rank}
    for rank in step.micro_batches:
        for batch in rank:
            assert len(batch) <= plan.sequences_per_micro_batch
            padded_tokens = len(batch) * max((lengths[index] for index in batch), default=0)
            if plan.max_tokens_per_micro_batch is not None and len(batch) > 1:
                assert padded_tokens <= plan.max_tokens_per_micro_batch


@settings(max_examples=50, deadline=None)
@given(lengths, plans)
def test_the_same_plan_every_time(lengths, plan):
    assert plan_step(lengths, plan) == plan_step(list(lengths), plan)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.data())
def test_a_step_that_fills_its_micro_batches_takes_no_more_of_them(ranks, size, accumulation, data):
    count = ranks * size * accumulation
    drawn = data.draw(st.lists(st.integers(1, 600), min_size=count, max_size=count))
    step = plan_step(drawn, PlanSettings(ranks, size))
    assert all(len(batch) == size for rank in step.micro_batches for batch in rank)
    assert step.micro_batches_per_rank == accumulation


def test_a_plan_by_hand():
    # Longest first: 50 40 30 20 10. Two a micro-batch on two ranks: four in the first round, dealt 0 1 1 0;
    # the one that is left goes to rank 0, and rank 1 has an empty micro-batch to keep step.
    lengths = [10, 50, 30, 40, 20]
    assert plan_step(lengths, PlanSettings(2, 2)) == StepPlan((((1, 4), (0,)), ((3, 2), ())))


def test_a_plan_under_a_token_budget_by_hand():
    # 100 tokens: two of 50 fit, then three of 30.
    lengths = [50, 50, 30, 30, 30]
    assert plan_step(lengths, PlanSettings(1, 4, 100)) == StepPlan((((0, 1), (2, 3, 4)),))


def test_a_sequence_above_the_budget_runs_alone():
    assert plan_step([10, 900, 10], PlanSettings(1, 4, 100)) == StepPlan((((1,), (0, 2)),))


def test_neighbours_in_length_share_a_micro_batch():
    lengths = [100, 1] * 8
    batches = plan_step(lengths, PlanSettings(2, 4)).micro_batches
    assert all(len({lengths[index] for index in batch}) == 1 for rank in batches for batch in rank)


def test_nothing_to_plan():
    assert plan_step([], PlanSettings(2, 4)) == StepPlan(((), ()))
