"""Guesses and plain rollouts are measured in turns, and the faster way is taken."""

from __future__ import annotations

from training.utils.generation.pace import Pace


def ways(pace: Pace, count: int, guessing: float, plain: float) -> tuple[list[bool], list[int]]:
    """Which of `count` rollouts were by guesses, at these seconds a token, and after which the verdict changed."""
    found, changed = [], []
    for place in range(count):
        way = pace.guesses_now("kind")
        if pace.note("kind", way, 10 * (guessing if way else plain), 10):
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


def test_kinds_are_measured_apart():
    pace = Pace(is_auto=True)
    ways(pace, 8, 2.0, 1.0)
    assert pace.guesses_now("another") and pace.guesses_now("kind") is False
