"""The batch planner: exact numbers of documents, whatever their lengths, ranks and bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.forked_programs import run_python
from training.utils.layout import planner
from training.utils.layout.bounds import forward_bound
from training.utils.layout.planner import (
    PlanSettings,
    balanced,
    forward_overhead_tokens,
    forward_plan,
    plan_step,
)

lengths = st.lists(st.integers(1, 600), max_size=60)
padded_plans = st.builds(
    PlanSettings,
    ranks=st.integers(1, 5),
    max_tokens_per_micro_batch=st.none() | st.integers(1, 2000),
    max_rows_per_micro_batch=st.integers(1, 9),
)
packed_plans = st.builds(
    PlanSettings,
    ranks=st.integers(1, 5),
    max_tokens_per_micro_batch=st.none() | st.integers(1, 4000),
    max_rows_per_micro_batch=st.none() | st.integers(1, 9),
    packed=st.just(True),
    max_row_tokens=st.integers(0, 1200),
    quadratic_tokens=st.floats(1.0, 1e6),
)
plans = padded_plans | packed_plans


def widest(lengths, rows) -> int:
    return max((sum(lengths[index] for index in row) for row in rows), default=0)


@settings(max_examples=200, deadline=None)
@given(lengths, plans)
def test_every_document_is_computed_exactly_once_and_whole(lengths, plan):
    step = plan_step(lengths, plan)
    planned = [index for rank in step for rows in rank for row in rows for index in row]
    assert sorted(planned) == list(range(len(lengths)))


@settings(max_examples=200, deadline=None)
@given(lengths, plans)
def test_ranks_have_as_many_micro_batches_and_bounds_hold(lengths, plan):
    step = plan_step(lengths, plan)
    assert len(step) == plan.ranks
    assert {len(rank) for rank in step} == {len(step[0])}
    for rank in step:
        for rows in rank:
            assert all(rows)  # no row is empty
            documents = sum(len(row) for row in rows)
            if not plan.packed:
                assert documents == len(rows) <= plan.max_rows_per_micro_batch
            computed_tokens = len(rows) * widest(lengths, rows)
            if plan.max_tokens_per_micro_batch is not None and documents > 1:
                assert computed_tokens <= plan.max_tokens_per_micro_batch


@settings(max_examples=200, deadline=None)
@given(lengths, packed_plans)
def test_a_row_is_no_wider_than_asked_unless_one_document_is(lengths, plan):
    for rank in plan_step(lengths, plan):
        for rows in rank:
            longest = max((lengths[index] for row in rows for index in row), default=0)
            assert widest(lengths, rows) <= max(plan.max_row_tokens, longest)
            for row in rows:  # a document that is wider has its row to itself
                assert len(row) == 1 or all(lengths[index] < max(plan.max_row_tokens, longest) for index in row)


@settings(max_examples=100, deadline=None)
@given(lengths, padded_plans)
def test_no_rank_computes_an_empty_micro_batch_beside_two_documents(lengths, plan):
    """What a rank has is spread over as many forwards as the busiest rank needs, where the bounds let it."""
    without_budget = replace(plan, max_tokens_per_micro_batch=None)
    for rank in plan_step(lengths, without_budget):
        documents = [len(rows) for rows in rank]
        assert not documents or max(documents) - min(documents) <= 1


def test_another_process_makes_the_same_plan():
    """Ranks do not talk about plans: nothing in one may hang on the process, hashing say. 26 documents on 8 ranks are
    mixed and dealt anew (`dealing`)."""
    plan = PlanSettings(8, 700, packed=True, max_row_tokens=300)
    lengths = [97 * index % 251 + 1 for index in range(26)]
    imports = "from math import inf\nfrom training.utils.layout.planner import PlanSettings, plan_step\n"
    program = f"{imports}print(plan_step({lengths}, {plan}))"
    said = run_python(["-c", program]).stdout.strip()
    assert said == str(plan_step(lengths, plan))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.data())
def test_a_step_that_fills_its_micro_batches_takes_no_more_of_them(ranks, size, accumulation, data):
    count = ranks * size * accumulation
    drawn = data.draw(st.lists(st.integers(1, 600), min_size=count, max_size=count))
    step = plan_step(drawn, PlanSettings(ranks, max_rows_per_micro_batch=size))
    assert all(len(rows) == size for rank in step for rows in rank)
    assert len(step[0]) == accumulation


@pytest.mark.parametrize(
    ("lengths", "plan", "planned"),
    [
        # One rank has three documents for micro-batches of two, so two of them; the other has two, and takes one at a
        # time to keep step. Of 150 tokens each gets 70 or 80: 40 30 10 and 50 20.
        ([10, 50, 30, 40, 20], PlanSettings(2, max_rows_per_micro_batch=2),
         ((((3,), (2,)), ((0,),)), (((1,),), ((4,),)))),
        # 100 tokens: two of 50 fit, then three of 30.
        ([50, 50, 30, 30, 30], PlanSettings(1, 100, 4), ((((0,), (1,)), ((2,), (3,), (4,))),)),
        # A sequence above the budget runs alone.
        ([10, 900, 10], PlanSettings(1, 100, 4), ((((1,),), ((0,), (2,))),)),
        ([10, 900, 10], PlanSettings(1, 100, packed=True, max_row_tokens=50), ((((1,),), ((0,), (2,))),)),
        # 32 tokens, rows of at most 12: three. Longest first, each to the emptiest: 9 | 7 | 6, 6+5, 7+3, 9+2: 11 wide.
        ([9, 5, 3, 7, 2, 6], PlanSettings(1, packed=True, max_row_tokens=12, quadratic_tokens=1e9),
         ((((0, 4), (3, 2), (5, 1)),),)),
        # A rank without documents keeps step.
        ([30, 20], PlanSettings(3, 1000, packed=True, max_row_tokens=100), ((((0,),),), (((1,),),), ((),))),
        ([], PlanSettings(2, max_rows_per_micro_batch=4), ((), ())),
        ([], PlanSettings(2, max_rows_per_micro_batch=4, packed=True), ((), ())),
        # Neighbours in length share a micro-batch.
        ([9, 1, 9, 1], PlanSettings(1, max_rows_per_micro_batch=2), ((((0,), (2,)), ((1,), (3,))),)),
        # Rows of any length make one row of a forward.
        ([150, 20, 90, 200, 10], forward_plan(5, 200, 64, packed=True, ranks=1, long_rows_are_free=True),
         ((((3, 0, 2, 1, 4),),),)),
    ],
)  # fmt: skip
def test_plans_by_hand(lengths, plan, planned):
    assert planned == plan_step(lengths, plan)


def test_wide_rows_cost_attention():
    """Where attention is free, full rows are worth their width; where it is dear, rows are the longest document's."""
    lengths = [100] * 10 + [60] * 10  # 800 tokens in each of two full rows, or 20 rows of 100 with 400 of padding
    free = PlanSettings(1, packed=True, max_row_tokens=1200, quadratic_tokens=1e9)
    (wide,) = plan_step(lengths, free)[0]
    (narrow,) = plan_step(lengths, replace(free, quadratic_tokens=10.0))[0]
    assert len(wide) * widest(lengths, wide) == sum(lengths)
    assert widest(lengths, narrow) == 100


def test_balanced_by_hand():
    # 8 | 7, then 6 to the emptier: 8 | 7 6, then 5: 8 5 | 7 6, then 4 at a tie of 13 tokens and 2 documents: the first.
    assert balanced([4, 5, 6, 7, 8], range(5), 2) == [[4, 1, 0], [3, 2]]
    assert balanced([4, 5, 6, 7, 8], [2, 0], 3) == [[2], [0], []]


@pytest.mark.parametrize(
    ("given", "sequences", "longest", "small", "bound"),
    [
        (None, 5, 200, True, 1000),  # 5 x 200 are below 2,048
        (None, 30, 200, True, 2048),
        (None, 30, 200, False, 6000),
        (None, 30, 3000, True, 3000),  # a sequence always fits
        (9000, 30, 200, True, 9000),  # what is given stands
    ],
)
def test_forwards_that_are_kept_small_hold_2048_tokens_or_the_longest_sequence(given, sequences, longest, small, bound):
    assert forward_bound(given, sequences, longest, packed=True, keeps_small=small) == bound
    assert forward_bound(given, sequences, longest, packed=False, keeps_small=small) == given
    for packed, most in ((True, bound), (False, given)):
        wanted = {"packed": packed, "max_tokens_per_micro_batch": given, "keeps_small": small}
        plan = forward_plan(sequences, longest, 64, ranks=3, **wanted)
        assert plan == PlanSettings(3, most, sequences, packed, longest, 384.0)


def test_dealings_that_cannot_cost_less_are_not_tried(monkeypatch):
    """400 documents in rows of any length: one row pads nothing, and no dealing into more rows is looked at. An
    evaluation's plan took half a second so."""
    tried = []
    monkeypatch.setattr(planner, "balanced", lambda *words: tried.append(words[2]) or balanced(*words))
    plan = forward_plan(400, 64, 192, packed=True, ranks=1, long_rows_are_free=True)
    plan_step([10 + index % 20 for index in range(400)], plan)
    assert tried == [1, 1, 2, 1, 1, 1, 1]  # forwards, rows of one; two forwards, each in two ways


def test_forwards_of_like_widths_are_weighed_against_their_own_cost():
    """Documents of 400, 400, 100, 100, and rows of 500 at most. One forward: two rows of 500 (400 + 100 each) pad
    nothing. Of 400, 400, 250, 250 and rows of 400 at most: one forward is four rows of 400 = 1,600 tokens; two are
    2 x 400 + 2 x 250 = 1,300 and another forward. Attention is left out: quadratic_tokens is infinite."""

    def plan(lengths: list[int], widest: int, forward_tokens: float) -> tuple:
        settings = PlanSettings(1, 10**6, None, True, widest, float("inf"), forward_tokens)
        return plan_step(lengths, settings)[0]

    assert len(plan([400, 400, 100, 100], 500, 1.0)) == 1
    # Beginning a forward counts once for each, where there are several: 2 x 140 < 300 saved < 2 x 160.
    assert plan([400, 250, 400, 250], 400, 140.0) == (((0,), (2,)), ((1,), (3,)))
    assert len(plan([400, 250, 400, 250], 400, 160.0)) == 1


def test_the_overhead_of_a_forward_by_hand():
    """CPU: 10 x 2e11 / 2e10 = 100 tokens, and 0.02 s x 2e11 / (6 x 25e6) = 26.7. GPU: 1,667, and 0.02 x 5e14 / 6e9 =
    1,667."""
    assert round(forward_overhead_tokens(25_000_000, on_gpu=False), 1) == 126.7
    assert round(forward_overhead_tokens(10**9, on_gpu=True)) == 3333


def costs_of(lengths, plan, step):
    """The cost of each rank by hand: a token 1, a pair of a plain document `pair_tokens`."""
    cost = [length + plan.pair_tokens * length * (length + 1) / 2 for length in lengths]
    return [sum(cost[i] for rows in rank for row in rows for i in row) for rank in step]


def test_ranks_get_equal_costs_where_attention_counts():
    """hidden size 8: a pair costs 1 / 48 tokens, so 480 tokens cost 480 + 2,405, and 48 tokens 48 + 24.5. By tokens the
    long document and fifteen short ones stand against the rest, by cost it alone: 2,885 beside 2,900."""
    lengths = [480] + [48] * 40
    plan = forward_plan(60, 480, 8, packed=True, ranks=2, long_rows_are_free=True)
    assert plan.pair_tokens == 1 / 48
    assert forward_plan(60, 480, 8, packed=True, ranks=2).pair_tokens == 0.0  # wide rows cost what they hold
    costs = costs_of(lengths, plan, plan_step(lengths, plan))
    assert sorted(map(round, costs)) == [2885, 2900]
    by_tokens = costs_of(lengths, plan, plan_step(lengths, replace(plan, pair_tokens=0.0)))
    assert max(by_tokens) == pytest.approx(2885 + 15 * 72.5)  # 15 of the 40 short ones
    assert plan_step(lengths, replace(plan, pair_tokens=1e-6)) == plan_step(lengths, replace(plan, pair_tokens=0.0))


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(2, 5), st.sampled_from([1e-4, 1e-2, 1.0]), st.none() | st.integers(1, 4000))
def test_by_cost_no_step_takes_longer_than_by_tokens(lengths, ranks, pair, budget):
    plan = PlanSettings(
        ranks, budget, packed=True, max_row_tokens=2000, quadratic_tokens=float("inf"), pair_tokens=pair
    )
    step, by_tokens = plan_step(lengths, plan), plan_step(lengths, replace(plan, pair_tokens=0.0))

    def longest(step):
        """Of each forward, the rank that takes longest."""
        return sum(
            max(
                len(rows) * widest(lengths, rows)
                + pair * sum(lengths[i] * (lengths[i] + 1) / 2 for row in rows for i in row)
                for rows in forward
            )
            for forward in zip(*step, strict=True)
        )

    assert longest(step) <= longest(by_tokens) * (1 + 1e-9)


def test_padded_ranks_get_equal_costs_too():
    """hidden size 1: rows of 60 tokens cost 60 + 600, rows of 6 cost 6 + 6; a rank has four of the eight."""
    lengths = [60, 60, 6, 6, 6, 6, 60, 6]
    step = plan_step(lengths, forward_plan(2, 60, 1, packed=False, ranks=2))
    assert sorted(sum(lengths[i] for rows in rank for row in rows for i in row) for rank in step) == [78, 132]


def test_pairs_of_documents_that_share_a_prompt_are_fewer():
    """Two documents of 100 tokens of which the one sees half as much, and many short ones."""
    lengths = [100, 100, *[10] * 6]
    plan = PlanSettings(2, packed=True, max_row_tokens=1000, quadratic_tokens=float("inf"), pair_tokens=1.0)
    pairs = [5050, 2525, *[55] * 6]
    light = plan_step(lengths, plan, pairs=pairs)
    assert sorted(sum(pairs[i] for rows in rank for row in rows for i in row) for rank in light) == [2855, 5050]
