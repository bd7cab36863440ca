"""The other ends of a rank, which no default run of the tests collects:

python -m pytest tests/end_to_end/long_faults.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.conftest import save_start
from tests.end_to_end.test_faults import ends_with_one_error, faulty

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def start(place: Path) -> Path:
    return save_start(place / "start_long_faults")


@pytest.mark.parametrize("fault", ["exit", "memory", "hang"])
def test_a_rank_that_ends(place: Path, start: Path, pairs_file: Path, fault: str) -> None:
    flags = ["--rank_timeout", 12] if fault == "hang" else []
    ran, seconds = faulty(place, f"long_faults_{fault}", fault, start, pairs_file, *flags)
    ends_with_one_error(ran, fault)
    assert seconds < 60, ran.words
