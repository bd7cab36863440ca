"""The simulated queue: hand-worked times; the table of training runs."""

from __future__ import annotations

import pytest

from benchmarks.rollouts_ahead import Run, simulated, simulated_free, simulated_held, table


def test_equal_lengths_hide_drawing_behind_training_but_for_the_first_step():
    """Two steps of two responses of a second on two servers of one slot; a step trains for a second. K = 0: drawn at 1,
    trained at 2, drawn at 3, trained at 4. K = 1: drawn at 1 and 2, trained at 2 and 3."""
    lengths = [[1.0, 1.0]] * 2
    assert simulated(0, lengths, (2, 1), 1.0, together=True) == pytest.approx((0.5, 0.5, 0.5))
    assert simulated(1, lengths, (2, 1), 1.0, together=True) == pytest.approx((2 / 3, 1 / 3, 1 / 3))


def test_servers_that_change_weights_by_themselves_do_not_wait_for_the_longest_response():
    """Lengths 3 and 1, then 1 and 3, K = 1. Together, the second step is drawn from 3 on, until 6. Each by itself, the
    second server begins at 1 with the response that comes first, and then takes the other: until 5."""
    lengths = [[3.0, 1.0], [1.0, 3.0]]
    together, alone = (simulated(1, lengths, (2, 1), 1.0, together=each) for each in (True, False))
    assert together.rate == pytest.approx(2 / 7) and alone.rate == pytest.approx(2 / 6)
    assert together.trainer == pytest.approx(5 / 7) and alone.servers == pytest.approx(1 - 8 / 12)


def test_free_takes_what_ended_first_by_hand():
    """Two steps of two responses, each a group, on two slots; a step trains for a second, weights are at most one step
    old. All four are begun by the first weights: 1 and 4 seconds at 0, then 1 and 1 in the first slot. Step 1 takes the
    two that end at 1 and 2, and trains until 3; step 2 waits for the long one, until 4: over at 5. In strict order,
    K = 1: step 1 begins at 4, step 2 at 5: over at 6."""
    lengths = [[1.0, 4.0], [1.0, 1.0]]
    free = simulated_free(1, lengths, 2, 1.0, group=1)
    assert free == pytest.approx((2 / 5, 3 / 5, 1 - 7 / 10))
    assert simulated(1, lengths, (1, 2), 1.0, together=True).rate == pytest.approx(2 / 6)


def test_held_begins_no_group_until_those_of_older_weights_have_ended():
    """Four steps of one group, of 1, 5, 1 and 3 seconds, two slots, two groups at once, weights at most two steps old.
    The first two are begun at 0; the first ends at 1, and the third is begun, by the same weights. Step 1 trains from 1
    to 2, step 2 on the third from 2 to 3. The fourth is begun by newer weights, once the long one has ended at 5, and
    ends at 8. Step 3 takes the long one, from 5 to 6, step 4 the fourth, from 8 to 9. Slots that wait for nothing begin
    the fourth at 2: steps 3 and 4 train from 5 to 7."""
    lengths = [[1.0], [5.0], [1.0], [3.0]]
    held = simulated_held(2, lengths, 2, 1.0, group=1, at_once=2)
    assert held == pytest.approx((4 / 9, 5 / 9, 1 - 10 / 18))
    assert simulated_free(2, lengths, 2, 1.0, group=1).rate == pytest.approx(4 / 7)


def test_free_waits_for_a_group_that_would_be_too_old():
    """Four steps of one group, the first of 10 seconds, the others of one, two slots. At most one step old: the first
    group is due in step 2, which waits for it. At most three: it is due in step 4."""
    lengths = [[10.0], [1.0], [1.0], [1.0]]
    strict, loose = (simulated_free(oldest, lengths, 2, 1.0, group=1) for oldest in (1, 3))
    assert strict.rate == pytest.approx(4 / 13)  # step 1 over at 2, step 2 at 11, two more
    assert loose.rate == pytest.approx(4 / 11)  # three steps are over at 4, the last at 11


def test_the_table_has_means_errors_and_differences_within_a_seed():
    found = [
        (Run(seed, ahead, correction), {"checker_after": score})
        for seed, ahead, correction, score in (
            (1, "0", "none", 0.8), (2, "0", "none", 0.9), (1, "free", "truncate", 0.7), (2, "free", "truncate", 0.9)
        )
    ]  # fmt: skip
    *_, first, second = table(found).splitlines()
    assert first == "| 0 |  | 0.850 ± 0.050 (0.800, 0.900) |  |"
    assert second == "| free | truncate | 0.800 ± 0.100 (0.700, 0.900) | -0.050 ± 0.050 |"
