"""The critic's values and gradient by a plain trainer's record: right, and with one fault planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from threestep.plugins.audit.judge import AGREES, first_wrong, judge
from threestep.plugins.audit.quantities.step import AuditedStep
from threestep.plugins.audit.recording.files import read_record
from threestep.plugins.audit.tests.examined.plain import Batch, Setup
from threestep.plugins.audit.tests.examined.plain_policy import PolicyTrainer
from threestep.plugins.audit.tests.examined.scoring import write_plain
from threestep.plugins.audit.text import verdict

pytestmark = pytest.mark.unit


def _one_late(self: Any, batch: Batch) -> torch.Tensor:
    """The state behind the token, not behind the one before it."""
    before_T = PolicyTrainer.new_values(self, batch)
    return torch.cat([before_T[1:], before_T[:1]])


def _learns_of_ranks(self: Any, batch: Batch, mask_T: torch.Tensor) -> None:
    """The loss is logged as it is, and its gradient is divided by the ranks."""
    before = {name: weight.grad.clone() for name, weight in self.critic.named_parameters() if weight.grad is not None}
    PolicyTrainer.learn_values(self, batch, mask_T)
    for name, weight in self.critic.named_parameters():
        if weight.grad is not None:
            old = before.get(name, torch.zeros_like(weight))
            weight.grad = old + (weight.grad - old) / self.setup.ranks


FAULTS = {
    "": {},
    "each value is read at the token itself, not at the place before it": {"new_values": _one_late},
    "divided by the number of ranks once more": {"learn_values": _learns_of_ranks},
}


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("cause", FAULTS)
def test_the_critic(tmp_path: Path, cause: str, packed: bool):
    write_plain(tmp_path, Setup("ppo", packed=packed, step=3), **FAULTS[cause])
    findings = judge(AuditedStep(read_record(tmp_path)))
    wrong = first_wrong(findings)
    if not cause:
        assert wrong is None, verdict(findings)
        agrees = {finding.name for finding in findings if finding.state == AGREES}
        assert agrees >= {"new_values", "value_loss", "critic_gradients"}
    else:
        name = "new_values" if "value" in cause else "critic_gradients"
        assert wrong is not None and wrong.name == name and wrong.difference is not None, verdict(findings)
        assert cause in wrong.difference.causes
        assert name == "new_values" or wrong.difference.where.startswith("the critic's ")
