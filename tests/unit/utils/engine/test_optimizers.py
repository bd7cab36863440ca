"""The optimizer that --optimizer selects, and its steps that are left out."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from training.utils.base.errors import ThreestepError
from training.utils.engine.config.arguments import OPTIMIZERS, EngineSettings
from training.utils.engine.optimizers import FiniteSteps, checked, make_optimizer
from training.utils.plugins.plugin import OptimizerEntry

NAN = float("nan")


@pytest.mark.parametrize("make", [partial(torch.optim.AdamW, lr=0.1), partial(torch.optim.SGD, lr=0.1, momentum=0.5)])
def test_a_step_that_is_not_finite_is_left_out(make):
    """Its own state stays too: the step after it is the first one's twin of a run without."""
    ends = []
    for slopes in ([1.0, NAN, 0.5], [1.0, 0.5]):
        weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        optimizer = checked(make([weight]))
        for slope in slopes:
            before = weight.detach().clone()
            weight.grad = torch.tensor([1.0, slope])
            optimizer.step()
            assert optimizer.overflow == (slope != slope)
            assert weight.equal(before) == optimizer.overflow
        ends.append(weight.detach().clone())
    assert ends[0].equal(ends[1])
    checked(make([torch.nn.Parameter(torch.zeros(1))])).step()  # without gradients


def plain(groups: Any, settings: EngineSettings) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.adam_beta1)


def nothing(groups: Any, settings: EngineSettings) -> None:
    return None


@pytest.mark.parametrize(("stage", "dtype", "is_checked"), [(0, "fp32", True), (0, "bf16", False), (2, "fp32", False)])
def test_an_optimizer_of_a_plugin_gets_the_groups_and_the_settings(monkeypatch, stage, dtype, is_checked):
    monkeypatch.setitem(OPTIMIZERS, "plain", OptimizerEntry(f"{__name__}:plain"))
    settings = EngineSettings(
        optimizer="plain", learning_rate=0.5, adam_beta1=0.8, weight_decay=0.1, zero_stage=stage, dtype=dtype
    )
    made = make_optimizer(torch.nn.Linear(2, 2), settings)
    assert isinstance(made, torch.optim.SGD) and isinstance(made, FiniteSteps) == is_checked
    groups = [(group["lr"], group["momentum"], group["weight_decay"]) for group in made.param_groups]
    assert groups == [(0.5, 0.8, 0.1), (0.5, 0.8, 0.0)]


def test_what_makes_no_optimizer_is_named(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "nothing", OptimizerEntry(f"{__name__}:nothing"))
    with pytest.raises(ThreestepError, match=f"--optimizer nothing expects .* from {__name__}:nothing, got a NoneType"):
        make_optimizer(torch.nn.Linear(2, 2), EngineSettings(optimizer="nothing"))
