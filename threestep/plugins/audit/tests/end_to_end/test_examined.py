"""The judge under examination: faults of one who did not write its causes, in a plain trainer of a Llama."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from threestep.plugins.audit.tests.examined.plain_faults import PLAIN_FAULTS
from threestep.plugins.audit.tests.examined.scoring import judged, of_plain_fault, right_setups, write_plain


@pytest.mark.parametrize("fault", PLAIN_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named(fault):
    said = of_plain_fault(fault, seed=2)
    # Of this one the first quantity has no known cause; the sentence names that of the next.
    ok = said.finds(fault) if fault.name == "grpo no temperature" else said.explains(fault)
    assert ok, said.sentence


def test_right_steps_are_right(tmp_path: Path):
    for number, setup in enumerate(islice(right_setups(5), 12)):
        assert judged(write_plain(tmp_path / str(number), setup)).quantity == "", setup
