"""The state about a step: gradients as they are before clipping, weights and moments; a skipped step has none."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from threestep.plugins.audit.recording import states
from threestep.plugins.audit.recording.states import StateWatch, digest
from training.utils.engine.config.arguments import EngineSettings
from training.utils.engine.ranks.startup import Ranks

pytestmark = pytest.mark.unit


class Deep:
    """As much of DeepSpeed's engine as a plain float32 step needs."""

    def __init__(self, optimizer: torch.optim.Optimizer, is_applied: bool) -> None:
        self.optimizer, self.is_applied, self.updates = optimizer, is_applied, 0

    def _take_model_step(self, kwargs: Any) -> None:
        nn.utils.clip_grad_norm_([weight for group in self.optimizer.param_groups for weight in group["params"]], 0.5)
        self.optimizer.step()
        self.updates = 1

    def was_step_applied(self) -> bool:
        return self.is_applied

    def gradient_clipping(self) -> float:
        return 0.5


@dataclass
class Engine:
    module: nn.Module
    engine: Deep
    settings: EngineSettings = field(default_factory=EngineSettings)
    total_steps: int = 10
    ranks: Ranks = field(default_factory=lambda: Ranks(0, 0, 1, torch.device("cpu")))

    @property
    def updates(self) -> int:
        return self.engine.updates


def stepped(
    keeps: bool,
    is_applied: bool = True,
    *,
    settings: EngineSettings | None = None,
    optimizer: Any = torch.optim.AdamW,
) -> tuple[StateWatch, torch.Tensor]:
    module = nn.Linear(2, 1)
    module.bias.requires_grad_(False)
    engine = Engine(module, Deep(optimizer([module.weight], lr=0.1), is_applied), settings or EngineSettings())
    watch = StateWatch(engine, keeps)  # type: ignore[arg-type]
    watch.start()
    (3.0 * module(torch.ones(1, 2))).sum().backward()
    before = module.weight.detach().clone()
    engine.engine._take_model_step(None)
    assert "_take_model_step" not in vars(engine.engine)
    return watch, before


def test_values_are_those_before_the_clip_and_about_the_update():
    watch, before = stepped(keeps=True)
    assert watch.values["gradients.weight"].tolist() == [[3.0, 3.0]]
    assert watch.values["weights_before.weight"].tolist() == before.tolist()
    assert {"weights_before.bias", "exp_avg.weight", "exp_avg_after.weight"} < set(watch.values)
    # Clipped from 3 sqrt(2) to 0.5, each is 0.5 / sqrt(2); a tenth of it is in the moment.
    assert watch.values["exp_avg_after.weight"] == pytest.approx(0.1 * 0.5 / np.sqrt(2.0))
    assert watch.digests["gradients.weight"]["norm"] == pytest.approx(3.0 * np.sqrt(2.0))


def test_without_values_there_are_digests_alone():
    watch, _ = stepped(keeps=False)
    assert not watch.values and set(watch.digests) == {
        "gradients.weight", "weights_before.weight", "weights_after.weight",
    }  # fmt: skip
    assert watch.digests["weights_before.weight"] != watch.digests["weights_after.weight"]


def test_a_skipped_step_has_no_state():
    watch, _ = stepped(keeps=True, is_applied=False)
    assert not watch.values and not watch.digests


def test_a_large_model_has_digests_alone(monkeypatch, capsys):
    monkeypatch.setattr(states, "MOST_WEIGHTS", 1)
    assert not stepped(keeps=True)[0].values
    assert "--record_values expects at most 1 weights, got 3: digests alone" in capsys.readouterr().out


def test_a_digest_by_hand():
    numbers = np.array([3.0, 4.0], dtype=np.float32)
    assert digest(numbers) == {"norm": 5.0, "sha256": hashlib.sha256(numbers.tobytes()).hexdigest()}


def test_the_settings_of_the_optimizer():
    watch, _ = stepped(keeps=False)
    found = watch.settings()
    assert (found["max_grad_norm"], found["total_steps"], found["updates_before"]) == (0.5, 10.0, 0.0)
    assert "adapter_learning_rate" not in found and found["schedule"] == "cosine"


def test_another_optimizer_and_schedule_are_left_out():
    """A record holds what its reader knows: without them the update is not judged."""
    settings = EngineSettings(optimizer="sign_sgd", lr_scheduler_type="inverse_time")
    watch, _ = stepped(keeps=True, settings=settings, optimizer=torch.optim.SGD)
    assert {"gradients.weight", "weights_before.weight", "weights_after.weight"} <= set(watch.values)
    assert not [name for name in watch.values if name.startswith("exp_avg")]
    assert {"schedule", "beta1", "beta2", "adam_epsilon", "weight_decay"}.isdisjoint(watch.settings())
