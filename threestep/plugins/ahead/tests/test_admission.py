"""Groups that are begun, and those that a step takes: no weights are older than the bound, whatever the timing."""

from __future__ import annotations

import random

import pytest

from threestep.plugins.ahead.admission import Admission


def test_a_step_takes_what_ended_first_by_hand():
    """Two groups a batch, oldest 2: step 1 leaves four of version 0, which may train in the steps 2 and 3, so that it
    takes what it likes; step 3 takes all that are left of version 0."""
    admission = Admission(oldest=2, groups=2, steps=9)
    assert [admission.admitted(step) for step in (1, 2, 7, 8, 9)] == [6, 8, 18, 18, 18]
    assert admission.taken(1, [0], [0] * 5) is None
    assert admission.taken(1, [0, 0, 0], [0] * 3) == [0, 1]
    assert admission.taken(2, [1, 0, 1], [0, 0, 0]) is None  # after step 2 at most two of version 0 may be left
    assert admission.taken(2, [1, 0, 1, 0], [0, 0]) == [1, 3]
    assert admission.taken(3, [2, 1, 0, 2], [0, 1]) is None
    assert admission.taken(3, [2, 1, 0, 2], [1]) == [0, 2]
    assert admission.taken(3, [2, 1, 0, 2], [1, 1]) == [1, 2]  # step 4 takes two of version 1, and there are three


def test_the_worked_example():
    assert Admission(1, 2, 9).taken(2, [0, 1, 1], [0]) is None
    assert Admission(1, 2, 9).taken(2, [1, 0, 1, 0], []) == [1, 3]


@pytest.mark.parametrize("oldest", [1, 2, 4])
@pytest.mark.parametrize("seed", range(20))
def test_every_group_trains_once_and_none_is_older_than_the_bound(oldest, seed):
    """A queue whose groups end in any order, some of them as late as they can."""
    dice = random.Random(f"{oldest} {seed}")
    admission = Admission(oldest, dice.randint(1, 4), steps=12)
    begun, trained = 0, list[int]()
    waiting, drawing, ended = 0, list[tuple[int, int]](), list[tuple[int, int]]()  # number and version
    for step in range(1, 13):
        waiting += admission.admitted(step) - begun
        begun += admission.admitted(step) - begun
        assert waiting + len(drawing) + len(ended) <= (oldest + 1) * admission.groups
        while True:
            others = [version for _, version in drawing] + [step - 1] * waiting
            places = admission.taken(step, [version for _, version in ended], others)
            if places is not None:
                break
            if waiting and (not drawing or dice.random() < 0.6):
                drawing.append((begun - waiting, step - 1))
                waiting -= 1
            else:  # the newest first, most of the time
                ended.append(drawing.pop(-1 if dice.random() < 0.8 else 0))
        assert len(places) == admission.groups
        assert max(step - 1 - ended[place][1] for place in places) <= oldest
        trained += [ended[place][0] for place in places]
        ended = [group for place, group in enumerate(ended) if place not in places]
    assert sorted(trained) == list(range(12 * admission.groups)) and not waiting and not drawing and not ended
