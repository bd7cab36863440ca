"""At shapes of 7B to 70B scaled down, ZeRO-3 gathers nearly all ahead of use: within what `--dry_run` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks
from tests.invariants import prefetch_program

pytestmark = [pytest.mark.distributed, pytest.mark.long, pytest.mark.timeout(900)]


def test_most_is_gathered_ahead_and_no_more_is_whole_than_said():
    first, second = run_ranks(Path(prefetch_program.__file__), 2, list(prefetch_program.SHAPES), timeout_seconds=800)
    assert first == second and set(first) == set(prefetch_program.SHAPES)
    for name, found in first.items():
        assert found["before"]["ahead"] < 0.7 < 0.95 < found["now"]["ahead"], name
        for limits in found.values():
            assert 0 < limits["whole"] <= limits["bound"], name
