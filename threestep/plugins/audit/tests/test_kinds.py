"""The kinds of steps: rows in the order of the micro-batches, what a z-loss leaves out, every trainer's kind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from threestep.plugins.audit.kinds.sft import sft_record
from threestep.plugins.audit.kinds.table import kind_of
from threestep.plugins.audit.recording.content import WatchedBatch
from threestep.plugins.audit.recording.schema import OBJECTIVES
from threestep.plugins.audit.recording.sequences import RowSequences
from training.step1_sft.regularizer import Regularizer
from training.step1_sft.trainer import SftStep
from training.step2_dpo.trainer import DpoStep
from training.step2_reward.trainer import RewardStep
from training.step3_ppo.learning.notes import PolicyStep

pytestmark = pytest.mark.unit


def step_of(figures: dict[str, float], z_loss_coef: float = 0.0) -> SftStep:
    rows = [SimpleNamespace(row_id=10 + place, loss_mask=np.array([False, place > 0])) for place in range(3)]
    taken = [SimpleNamespace(taken=(2,)), SimpleNamespace(taken=(0,))]  # the rank has no second row
    prepared: Any = SimpleNamespace(batch=rows, micro_batches=taken, targets=4)
    regularizer = Regularizer()
    regularizer.losses, regularizer.recorded = ("z_loss",) * bool(z_loss_coef), {"z_loss_coef": z_loss_coef}
    return SftStep(7, figures, lambda: [10, 11, 12], prepared, regularizer)


def watched() -> dict[str, list[WatchedBatch]]:
    sequences = RowSequences(torch.tensor([2]), torch.tensor([5, 6]), torch.tensor([1]))
    return {"train": [WatchedBatch(sequences, torch.tensor([-0.5]), torch.tensor(0.25))] * 2}


def test_rows_and_figures():
    figures = {"loss": 0.5, "train/grad_norm": 2.0, "train/learning_rate": 0.1, "right": 1.0}
    head, tensors, notes = vars(sft_record(step_of(figures), watched())).values()
    assert (head.objective, head.step, head.settings) == ("sft", 7, {"reduction": "token mean"})
    assert head.figures == {"loss": 0.5, "denominator": 4.0, "grad_norm": 2.0, "learning_rate": 0.1}
    assert tensors["rows"].tolist() == [12, 10] and tensors["data_mask"].tolist() == [False, True, False, False]
    assert tensors["logprobs"].tolist() == [0.0, -0.5] * 2 and tensors["micro_losses"].tolist() == [0.25, 0.25]
    assert not any(notes.values())


def test_parts_of_a_loss_with_a_z_loss_are_left_out():
    content = sft_record(step_of({"loss": 0.5, "z_loss": 0.1}, z_loss_coef=0.01), watched())
    assert "micro_losses" not in content.tensors and content.notes["z_loss_coef"] == 0.01


@pytest.mark.parametrize(
    ("step", "function"),
    [(SftStep, "sft_record"), (RewardStep, "reward_record"), (DpoStep, "dpo_record"), (PolicyStep, "policy_record")],
)
def test_the_steps_of_every_trainer(step, function):
    kind = kind_of(step.kind)
    assert kind is not None and kind.record.__name__ == function and step.kind in OBJECTIVES


def test_a_kind_of_others():
    assert kind_of("hinge") is None
