"""The clock beside published speeds: rows, ranks of choices, the constant of the other sources."""

from __future__ import annotations

import pytest

from benchmarks.clock import __main__ as compared
from benchmarks.clock.predicted import device_of, predicted_parts, predicted_rate
from benchmarks.clock.rows import Row, published_rows

SMALL = Row("F", "a100", "mpt-125m", 2048, 8, 32, 2, "", 141737.0)


def test_rows_are_read():
    rows = published_rows()
    assert len(rows) == 48 and len({row[:8] for row in rows}) == 48
    assert SMALL in rows and {row.source for row in rows} == set("FTABU")
    assert SMALL.name == "F a100 x 8, mpt-125m, 32 x 2048 x 2"


def test_a_row_is_predicted():
    assert predicted_rate(SMALL, 0.85) == pytest.approx(SMALL.published, rel=0.3)
    recomputed = SMALL._replace(settings="R")
    assert "recomputation" in predicted_parts(recomputed, 0.85) and "recomputation" not in predicted_parts(SMALL, 0.85)
    assert predicted_rate(recomputed, 0.85) < predicted_rate(SMALL, 0.85)
    assert "tensor parallel" in predicted_parts(SMALL._replace(settings="2"), 0.85)


def test_devices_are_those_of_the_source():
    assert (
        device_of(SMALL).attention.forward == 0.40 and device_of(SMALL._replace(source="U")).attention.forward == 0.73
    )
    assert device_of(SMALL._replace(device="h100-titan")).memory_rate == 2400


def test_a_row_has_no_part_in_its_own_constant(monkeypatch):
    """Three sources, whose rows run at 0.5, 0.7 and 0.9 of what a share of 1 predicts."""
    monkeypatch.setattr(compared, "predicted_rate", lambda row, share: 100 * share)
    rows = [SMALL._replace(source=name, published=speed) for name, speed in (("A", 50), ("B", 70), ("C", 90))]
    assert [compared.share_without(rows, name) for name in "ABC"] == [0.8, 0.7, 0.6]


def test_choices_are_of_one_model_and_source_that_differ():
    rows = [SMALL._replace(published=speed) for speed in (100.0, 200.0, 202.0)] + [SMALL._replace(source="U")]
    assert compared.ranked(rows, [1.0, 2.0, 3.0, 9.0]) == (2, 2)
    assert compared.ranked(rows, [2.0, 1.0, 3.0, 9.0]) == (1, 2)
