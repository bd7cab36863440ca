"""The order of rows: whole epochs, the same however it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.forked_programs import run_python
from training.utils.layout.order import ShuffledStream, completes_epochs, evaluates_by_default, steps_in

rows = st.integers(1, 40)
seeds = st.integers(0, 2**63 - 1)


@settings(max_examples=60, deadline=None)
@given(rows, seeds, st.lists(st.integers(0, 30), max_size=8))
def test_the_stream_is_the_same_however_it_is_cut(rows, seed, cuts):
    whole = ShuffledStream(rows, seed).take(0, sum(cuts))
    stream, pieces = ShuffledStream(rows, seed), []
    for count in cuts:
        pieces += stream.take(len(pieces), count)
    assert pieces == whole == ShuffledStream(rows, seed).take(0, 300)[: len(whole)]


@settings(max_examples=60, deadline=None)
@given(rows, seeds, st.integers(0, 5))
def test_every_epoch_is_a_permutation(rows, seed, epoch):
    assert sorted(ShuffledStream(rows, seed).take(epoch * rows, rows)) == list(range(rows))


def test_unshuffled_epochs_are_the_rows_in_their_order():
    stream = ShuffledStream(5, 1, shuffled=False)
    assert stream.take(0, 12) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert stream.take(4, 3) == [4, 0, 1]


def test_epochs_and_seeds_differ():
    """DeepSpeed-Chat never calls set_epoch: every epoch has the first one's order."""
    stream = ShuffledStream(100, 1)
    assert stream.take(0, 100) != stream.take(100, 100)
    assert stream.take(0, 100) != ShuffledStream(100, 2).take(0, 100)
    assert stream.take(0, 100) == ShuffledStream(100, 1).take(0, 100)


def test_another_process_takes_the_same_order():
    program = "from training.utils.layout.order import ShuffledStream; print(ShuffledStream(50, 7).take(30, 60))"
    said = run_python(["-c", program]).stdout.strip()
    assert said == str(ShuffledStream(50, 7).take(30, 60))


@pytest.mark.parametrize(
    ("rows", "epochs", "sequences", "steps"),
    [
        (100, 1, 16, 6),
        (100, 2, 16, 12),  # 200 rows: epochs follow each other without a gap
        (15, 1, 16, 0),
        (100, 0.5, 10, 5),
        (100, 0.29, 29, 1),  # 100 * 0.29 is 28.999999999999996 in binary
    ],
)
def test_whole_steps(rows, epochs, sequences, steps):
    assert steps_in(rows, epochs, sequences) == steps


@settings(max_examples=60, deadline=None)
@given(rows, st.integers(1, 50), st.floats(0.1, 3))
def test_epochs_are_complete_as_often_as_they_fit(rows, per_step, epochs):
    """Steps of many epochs complete several at once."""
    steps = range(1, 60)
    due = [step for step in steps if completes_epochs(step, epochs, rows / per_step)]
    passes = [int(step * per_step / (rows * epochs) + 1e-6) for step in (0, *steps)]
    assert due == [step for step in steps if passes[step] > passes[step - 1]]


def test_no_epochs_are_never_complete():
    assert [step for step in range(1, 9) if completes_epochs(step, 1, 2.5)] == [3, 5, 8]
    assert not any(completes_epochs(step, 0, 2.5) for step in range(9))
    assert steps_in(10, float("inf"), 3) > 10**9


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 500), st.integers(1, 64), st.integers(0, 4000))
def test_ten_evenly_spaced_evaluations_that_read_no_more_than_training(total, per_step, eval_rows):
    trained = total * per_step
    due = [step for step in range(1, total + 1) if evaluates_by_default(step, total, trained, eval_rows)]
    fitting = max(1, min(10, trained // max(eval_rows, 1)))
    assert due == sorted({-(-total * part // fitting) for part in range(1, fitting + 1)})
    assert due[-1] == total and len(due) <= 10 and (len(due) == 1 or len(due) * eval_rows <= trained)


def test_evaluations_of_a_usual_run_a_short_one_and_a_costly_one():
    def due(total: int, eval_rows: int) -> list[int]:
        return [step for step in range(1, total + 1) if evaluates_by_default(step, total, total * 8, eval_rows)]

    assert due(100, 10) == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    assert due(4, 3) == [1, 2, 3, 4]
    assert due(100, 250) == [34, 67, 100]
    assert due(100, 10_000) == [100] == due(100, 801)
