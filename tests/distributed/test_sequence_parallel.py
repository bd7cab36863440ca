"""Rows over several ranks, in float64: what models return and their gradients are those of whole rows on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks

pytestmark = pytest.mark.distributed

PROGRAM = Path(__file__).with_name("sliced_program.py")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_slices_of_rows_compute_what_whole_rows_do(ranks: int):
    """Packed rows with a shared prompt, padded rows, and a rank without a target; a dense mask and runs; 12, 3 and 1
    key-value heads of 12 query heads; with recomputation, and scores of sequences."""
    reports = run_ranks(PROGRAM, ranks)
    for found in reports:
        right = {name: each for name, each in found.items() if not name.startswith("broken")}
        assert len(right) == (20 if ranks == 2 else 40)
        assert max(each["read"] for each in right.values()) < 1e-12
        assert max(each["gradient"] for each in right.values()) < 1e-12
        for name in ("broken_Exchange", "broken_Sum"):
            assert found[name]["read"] < 1e-12 and found[name]["gradient"] > 0.1, name
