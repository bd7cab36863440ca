"""The other ends of a rank, and slow files: of the long form."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.conftest import MODULES, SHARED, run_module, save_start
from tests.end_to_end.test_faults import BATCH, FAULTY, ends_with_one_error, faulty

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def start(place: Path) -> Path:
    return save_start(place / "start_long_faults")


@pytest.mark.parametrize("fault", ["exit", "memory", "hang"])
def test_a_rank_that_ends(place: Path, start: Path, pairs_file: Path, fault: str) -> None:
    flags = ["--rank_timeout", 12] if fault == "hang" else []
    ran, seconds = faulty(place, f"long_faults_{fault}", fault, start, pairs_file, *flags)
    ends_with_one_error(ran, fault)
    assert seconds < 60, ran.words


def test_slow_files_of_the_first_rank_are_no_hang(place: Path, start: Path, pairs_file: Path) -> None:
    data = ["--data_path", f"jsonl:{pairs_file}", *SHARED.split(), "--data_output_path", place / "faults_cache"]
    data += ["--model_name_or_path", start, "--output_dir", place / "long_faults_slow", *BATCH.split()]
    ran = run_module(
        FAULTY, ["slow", 0, MODULES[1], *data, "--rank_timeout", 12, "--save_every", 2], ranks=2, launcher=True
    )
    assert ran.code == 0, ran.words
    assert (place / "long_faults_slow" / "model").is_dir()
