"""What an engine keeps goes from any ZeRO stage to any other unchanged: float32 weights, Adam's moments and count, and
each parameter group's own learning rate and decay."""

from __future__ import annotations

import pytest

from tests.invariants import universal_program

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # on a busy machine


EVERY = [
    pytest.param(case, marks=[pytest.mark.long] if case in universal_program.LONG else [])
    for case in universal_program.CASES
]


@pytest.mark.parametrize("case", EVERY)
def test_nothing_changes_on_the_way(launched, case):
    _, reports = launched("universal_program", 2)
    found = reports[0][case]
    stages = universal_program.CASES[case][0]
    assert len(found) == len(stages)
    stepped = not case.startswith("not_stepped")
    for where, told in found.items():
        assert (told["changed"], told["weights"]) == (0.0, 0.0), where
        assert told["same_names"] and told["same_groups"], where
        assert told["counted"] == told["step"] + 1.0, where
        assert told["step"] == 3.0 * stepped and (told["moved"] > 0.0) == stepped, where
