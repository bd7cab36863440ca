"""Rows over several ranks, in float64: what models return and their gradients are those of whole rows on one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
from threestep.plugins.long_rows.tests.distributed import sliced_program

pytestmark = pytest.mark.distributed

PROGRAM = Path(__file__).with_name("sliced_program.py")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_slices_of_rows_compute_what_whole_rows_do(ranks: int):
    """Packed rows with a shared prompt, or with paths side by side, padded rows, and a rank without a target; a dense
    mask and runs; 12, 3 and 1 key-value heads of 12 query heads; with recomputation, and scores of sequences; with a
    head for multi-token prediction, whose states cross slices; with routers, their load, and experts that are given;
    and families with windows, sinks, caps, latent keys and keys of other layers, parts of which compute in float32."""
    reports = run_ranks(PROGRAM, ranks)
    for found in reports:
        right = {name: each for name, each in found.items() if not name.startswith("broken")}
        assert len(right) == (33 if ranks == 2 else 89)
        for name, each in right.items():
            in_float32 = any(family in name for family in sliced_program.FAMILIES)
            assert max(each.values()) < (3e-6 if in_float32 else 1e-12), name
        for name in ("broken_Exchange", "broken_Sum", "broken_Bring"):
            assert found[name]["read"] < 1e-12 and found[name]["gradient"] > 0.1, name
