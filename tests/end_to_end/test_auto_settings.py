"""Settings of tests/auto_settings.py: two; in the long form 40."""

from __future__ import annotations

import pytest

from tests.support.forked_programs import run_python

pytestmark = pytest.mark.timeout(900)  # on a busy machine


@pytest.mark.parametrize(
    "count",
    [2, pytest.param(40, marks=[pytest.mark.long, pytest.mark.timeout(10000)])],
)
def test_what_auto_chooses_is_its_explicit_form_to_the_bit(tmp_path, count: int):
    words = ["-m", "tests.auto_settings", "2", "--count", str(count), "--place", str(tmp_path)]
    done = run_python(words, timeout_seconds=800 if count == 2 else 9000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum("| the same bits |" in line for line in done.stdout.splitlines()) == count
