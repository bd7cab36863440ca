"""The judge under examination: `python -m threestep.plugins.audit.tests.examined`, six of its faults in the short
form."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from threestep.plugins.audit.tests.examined import __main__ as program
from threestep.plugins.audit.tests.examined.plain_faults import PLAIN_FAULTS
from threestep.plugins.audit.tests.examined.scoring import judged, of_plain_fault, right_setups, write_plain

SHORT = (
    "dpo reference is the policy", "sft end untrained", "sft norms decay", "reward margin added",
    "grpo clip on the wrong side", "ppo reward one early",
)  # fmt: skip


@pytest.mark.parametrize("name", SHORT)
def test_a_fault_is_named(name: str):
    [fault] = [fault for fault in PLAIN_FAULTS if fault.name == name]
    assert of_plain_fault(fault, seed=2).explains(fault)


def test_right_steps_are_right(tmp_path: Path):
    for number, setup in enumerate(islice(right_setups(5), 12)):
        assert judged(write_plain(tmp_path / str(number), setup)).quantity == "", setup


@pytest.mark.long
@pytest.mark.timeout(1800)  # on a busy machine
def test_the_whole_examination(capsys):
    program.main([])  # exits with 1 below 55 quantities, 45 causes, or with a false alarm
    assert "60 faults" in capsys.readouterr().out
