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


LONG_ROWS = Path(__file__).with_name("long_rows_program.py")
T, WIDTH, INNER, VOCABULARY = 4096, 32, 96, 4000


@pytest.mark.parametrize("recompute", [0, 1])
def test_a_rank_holds_half_and_nothing_of_a_square_or_of_all_logits(recompute):
    """The largest tensor of T tokens is an MLP's, T x 96 floats (1.5 MiB), or a chunk of logits (1 MiB), or the
    gradient of the head's weight (0.5 MiB). A mask of T x T would take 16 MiB, logits of a rank's targets 31 MiB."""
    reports = run_ranks(LONG_ROWS, 2, [T, f"recompute={recompute}"])
    for found in reports:
        assert found["whole"]["largest"] == 4 * T * INNER
        assert found["sliced"]["largest"] <= 2**20 + 4 * VOCABULARY
        assert found["sliced"]["largest"] < T * T / 2 and 4 * found["sliced"]["largest"] < T * VOCABULARY
        assert found["sliced"]["peak"] <= 0.6 * found["whole"]["peak"]
