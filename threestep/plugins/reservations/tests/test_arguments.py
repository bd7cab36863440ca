"""Durations and mistakes of reservations."""

from __future__ import annotations

import pytest

from threestep.plugins.reservations.arguments import ReservationArguments, seconds_of
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.flags.flags import note_mistakes


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("1.5", 1.5), ("45s", 45.0), ("90m", 5400.0), ("1h30m", 5400.0), ("2d1s", 172801.0), ("", None),
     ("1m1h", None), ("soon", None), ("-5", None)],
)  # fmt: skip
def test_durations(text, seconds):
    assert seconds_of(text) == seconds


def test_mistakes_are_told():
    mistakes = Mistakes()
    note_mistakes(ReservationArguments(stop_before="soon", stop_at=""), mistakes)
    with pytest.raises(ThreestepError) as told:
        mistakes.raise_if_any()
    for part in (
        "--stop_before expects a duration such as 5400, 90m or 1h30m, got 'soon'",
        "--stop_at expects auto, a variable, a file or a time, got nothing",
    ):
        assert part in str(told.value)
