"""Two runs with one planted difference end at its very place (python -m tests.bisected_runs has all pairs)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bisected_runs import HEALTHY, PAIRS, Bench, is_there
from training.audit.bisect.text import verdict

pytestmark = pytest.mark.timeout(900)  # on a busy machine
SHORT = ("sft token",)
LONG = ("sft 1 and 2 ranks, ZeRO 3", "sft second moment", "dpo query", "ppo rollout score", "sft healthy, ZeRO 0 and 3")


@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_a_pair_ends_at_its_place(tmp_path: Path, name: str):
    pair = {**PAIRS, **HEALTHY}[name]
    found = Bench(tmp_path).bisected(name, pair)
    assert is_there(found, pair.expected), verdict(found)
    assert not found.notes
