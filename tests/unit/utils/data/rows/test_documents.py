"""What a step's rows have in common."""

from __future__ import annotations

import numpy as np
import pytest

from training.utils.contracts.rows import SentenceRow
from training.utils.data.rows.documents import shared_share
from training.utils.layout.planner import PlanSettings


def row(*ids: int) -> SentenceRow:
    return SentenceRow(0, input_ids=np.array(ids), loss_mask=np.array([False, *[True] * (len(ids) - 1)]))


@pytest.mark.parametrize("least", [3, 6])
def test_the_share_that_equal_beginnings_spare(least):
    """Of three rows of 8 tokens, two begin with the same 5."""
    plan = PlanSettings(1, 100, 3, True, max_row_tokens=50, least_shared_tokens=least)
    rows = [row(1, 2, 3, 4, 5, 6, 7, 8), row(9, 8, 7, 6, 5, 4, 3, 2), row(1, 2, 3, 4, 5, 9, 9, 9)]
    assert shared_share(rows, plan) == pytest.approx(5 / 24 if least == 3 else 0.0, abs=1 / 24)
