"""What a step's rows have in common."""

from __future__ import annotations

import numpy as np
import pytest

from training.utils.contracts.rows import SentenceRow
from training.utils.data.rows.documents import shared_share
from training.utils.layout.planner import PlanSettings


def row(*ids: int) -> SentenceRow:
    return SentenceRow(0, input_ids=np.array(ids), loss_mask=np.array([False, *[True] * (len(ids) - 1)]))


@pytest.mark.parametrize(
    ("least", "share"),
    [(3, 1 - (3 + 1 + 2 + 4) / 13), (4, 0.0)],  # two rows of three equal tokens, and one that begins otherwise
)
def test_the_share_that_equal_beginnings_spare(least, share):
    plan = PlanSettings(1, 100, 3, True, max_row_tokens=50, least_shared_tokens=least)
    rows = [row(1, 2, 3, 4), row(9, 8, 7, 6), row(1, 2, 3, 5, 6)]
    assert shared_share(rows, plan) == pytest.approx(share)
