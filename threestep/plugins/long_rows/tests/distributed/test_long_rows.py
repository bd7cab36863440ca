"""A long row over two ranks: a rank holds half, and no tensor of T x T, nor of T x vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks

pytestmark = pytest.mark.distributed

PROGRAM = Path(__file__).with_name("long_rows_program.py")
T, WIDTH, INNER, VOCABULARY = 4096, 32, 96, 4000


@pytest.mark.parametrize("recompute", [0, 1])
def test_a_rank_holds_half_and_nothing_of_a_square_or_of_all_logits(recompute):
    """The largest tensor of T tokens is an MLP's, T x 96 floats (1.5 MiB), or a chunk of logits (1 MiB), or the
    gradient of the head's weight (0.5 MiB). A mask of T x T would take 16 MiB, logits of a rank's targets 31 MiB."""
    reports = run_ranks(PROGRAM, 2, [T, f"recompute={recompute}"])
    for found in reports:
        assert found["whole"]["largest"] == 4 * T * INNER
        assert found["sliced"]["largest"] <= 2**20 + 4 * VOCABULARY
        assert found["sliced"]["largest"] < T * T / 2 and 4 * found["sliced"]["largest"] < T * VOCABULARY
        assert found["sliced"]["peak"] <= 0.6 * found["whole"]["peak"]
