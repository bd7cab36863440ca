"""Settings of tests/random_settings.py, in the long form alone: what it finds is shown by smaller tests."""

from __future__ import annotations

import pytest

from tests.support.forked_programs import run_python

pytestmark = [pytest.mark.long, pytest.mark.timeout(10000)]  # on a busy machine


def test_settings_at_random_train_the_same_in_three_layouts(tmp_path):
    done = run_python(["-m", "tests.random_settings", "1", "--place", str(tmp_path)], timeout_seconds=9000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum("| agree |" in line for line in done.stdout.splitlines()) == 64
