"""The line of a split in the log."""

from __future__ import annotations

import pytest

from training.utils.data.cache.shards import Counts, SplitReport, split_sentence

pytestmark = pytest.mark.unit


def test_nothing_but_reasons_follows_what_was_dropped():
    counts = Counts(truncated=3)
    counts.dropped.update(too_long=2, empty_response=1)
    counts.noted["whose response follows the prompt"] = 54
    counts.parallel["with blocks"] = 7
    said = split_sentence("train", SplitReport(rows=54, tokens=1234, **counts.as_json()))
    kept, _, dropped = said.partition("dropped: ")
    assert dropped == "1 empty_response, 2 too_long"
    assert all(part in kept for part in ("54 rows", "3 truncated", "54 whose response follows", "7 with blocks"))
