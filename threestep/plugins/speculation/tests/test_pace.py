"""Guesses and plain rollouts are measured in turns, and the faster way is taken."""

from __future__ import annotations

import json

from threestep.plugins.speculation.pace import Pace, RoundPace


def ways(pace: Pace, count: int, guessing: float, plain: float) -> tuple[list[bool], list[int]]:
    """Which of `count` rollouts were by guesses, at these seconds a token, and after which the verdict changed."""
    found, changed = [], []
    for place in range(count):
        way = pace.guesses_now((1,))
        if pace.note((1,), way, 10 * (guessing if way else plain), 10):
            changed.append(place)
        found.append(way)
    return found, changed


def test_guesses_that_do_not_pay_are_left_out_until_they_do():
    pace = Pace(is_auto=True)
    found, changed = ways(pace, 40, 2.0, 1.0)
    assert found[:6] == [True, False] * 3 and changed == [5] and pace.speedup == 0.5
    assert sum(found[6:]) == 2  # measured again, every 16th
    found, changed = ways(pace, 40, 0.5, 1.0)
    assert len(changed) == 1 and all(found[changed[0] + 1 :][:8]) and pace.speedup == 2.0


def test_guesses_that_are_asked_for_stay_and_are_measured():
    found, changed = ways(Pace(is_auto=False), 40, 2.0, 1.0)
    assert changed == [5] and found[6:].count(False) == 2


def test_what_is_known_is_saved():
    pace, other = Pace(is_auto=True), Pace(is_auto=True)
    kinds = ((3, 1.0, 5), (4, 0.0, 5))
    for place in range(9):
        pace.note(kinds[place % 2], pace.guesses_now(kinds[place % 2]), 1.0 + place, 10)
    other.load_state_dict(json.loads(json.dumps(pace.state_dict())))
    assert other.state_dict() == pace.state_dict() != []
    for _ in range(40):
        ways = [each.guesses_now(kinds[0]) for each in (pace, other)]
        assert ways[0] == ways[1]
        assert pace.note(kinds[0], ways[0], 2.0 - ways[0], 1) == other.note(kinds[0], ways[0], 2.0 - ways[0], 1)


def test_kinds_are_measured_apart():
    pace = Pace(is_auto=True)
    ways(pace, 8, 2.0, 1.0)
    assert pace.guesses_now((2,)) and pace.guesses_now((1,)) is False


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_rounds_of_few_rows_guess_where_that_is_faster():
    """A round takes 1 second without guesses. By guesses it takes 1.1 at 4 rows, 1.6 at 32, and gives 1.5 tokens."""
    clock = _Clock()
    pace = RoundPace(is_auto=True, clock=clock)
    pace.end(3)  # of the prompts, which nothing began

    def ways(rows: int, rounds: int) -> list[bool]:
        found = []
        for _ in range(rounds):
            found.append(pace.begin(rows))
            clock.now += (1.1 if rows < 8 else 1.6) if found[-1] else 1.0
            pace.end(rows * 3 // 2 if found[-1] else rows)
        return found

    assert ways(4, 8) == ways(32, 8) == [True, False] * 4  # both are tried four times
    assert ways(4, 60).count(False) == 2 and ways(32, 60).count(True) == 2  # and then one of 32 checks
    assert ways(5, 1) == [True]  # of about as many rows
    always = RoundPace(clock=clock)
    assert always.begin(32) and always.begin(32) and not always._known
