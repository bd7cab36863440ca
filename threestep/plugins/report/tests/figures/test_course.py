"""The best of a run's evaluations, and when a run got worse."""

from __future__ import annotations

import math

import pytest

from threestep.plugins.report.figures.course import course_of


def test_best_is_the_first_of_the_best_and_what_is_not_finite_does_not_count():
    points = [(0, 3.0), (1, None), (2, 1.0), (3, math.nan), (4, 1.0), (5, 2.0), (6, math.inf)]
    course = course_of("eval/loss", points)
    assert (course.first, course.best, course.last) == ((0, 3.0), (2, 1.0), (5, 2.0))
    assert course_of("eval/accuracy", points).best == (0, 3.0)
    assert course_of("eval/loss", [(0, None)]) is None


@pytest.mark.parametrize(
    ("first", "best", "last", "lost"),
    [
        (4.5, 2.0, 2.03, False),
        (4.5, 2.0, 2.05, True),
        (6.0, 0.01, 0.05, False),  # five times the best, and within 1 % of what was gained
        (6.0, 0.01, 0.1, True),
        (2.01, 2.0, 2.03, False),  # more than it gained, and within 2 % of the best
        (2.01, 2.0, 2.05, True),
        (4.5, 2.0, 2.0, False),
    ],
)
def test_a_run_got_worse_by_shares_of_its_gain_and_of_its_best(first, best, last, lost):
    course = course_of("eval/loss", [(0, first), (1, best), (2, last)])
    assert course.lost() is lost and bool(course.sentence()) is lost


def test_noise_is_not_worse():
    course = course_of("eval/reward", [(0, 1.0), (10, 2.0), (20, 1.5)])
    assert course.lost(error=0.2) and not course.lost(error=0.3)
    assert course.sentence(0.3) == ""
