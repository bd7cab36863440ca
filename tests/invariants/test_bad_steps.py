"""An optimizer step whose loss or gradient is not finite changes nothing, at any ZeRO stage, on any rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from training.utils.engine.config.arguments import EngineSettings
from training.utils.engine.ranks.startup import DTYPES
from training.utils.engine.training_engine import TrainingEngine

# A micro-batch of one rank has a loss of NaN, an infinite one, or a finite one whose gradient is NaN.
KINDS = ("nan_loss", "infinite_loss", "nan_gradient")
SETTINGS = [(stage, dtype, False) for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16")]
SETTINGS += [(2, "fp32", True), (3, "bf16", True)]


class Net(nn.Module):
    """Two layers; `bad` says how the loss goes wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor, bad: str) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        loss = self.second(hidden).float().square().mean()
        if bad == "nan_loss":
            return loss * float("nan")
        if bad == "infinite_loss":  # its gradient is finite
            return loss + float("inf")
        if bad == "nan_gradient":  # the slope of the root at 0, times 0
            return loss + (hidden[0, 0].float() * 0).sqrt()
        return loss


def run(stage: int, dtype: str, offload: bool, kinds: list[str], ranks: Any) -> dict[str, Any]:
    """Take a step for each of `kinds`, "" being a good one of the next data."""
    torch.manual_seed(0)
    settings = EngineSettings(
        dtype=dtype, zero_stage=stage, offload=offload, learning_rate=1e-2, num_warmup_steps=2, weight_decay=0.1
    )
    engine = TrainingEngine(Net().to(DTYPES[dtype]), settings, ranks, 8)
    engine.train()
    good, skipped, moved, rates = 0, [], [], []
    for kind in kinds:
        before = weights(engine)
        good += not kind
        for micro_batch in range(2):
            generator = torch.Generator().manual_seed(100 * good + 10 * micro_batch + ranks.rank)
            inputs = torch.randn(4, 6, generator=generator).to(DTYPES[dtype])
            is_bad = kind and micro_batch == 0 and ranks.rank == ranks.world_size - 1
            engine.backward(engine(inputs, kind if is_bad else "") / (2 * ranks.world_size))
        report = engine.step()
        skipped.append(report.skipped)
        rates.append(report.learning_rate)
        moved.append([name for name, weight in weights(engine).items() if not weight.equal(before[name])])
    return {"skipped": skipped, "moved": moved, "rates": rates, "end": weights(engine)}


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of the whole weights, on every rank."""
    return {name: tensor.detach().float().clone() for name, tensor in engine.full_tensors(engine.module)}


def on_ranks(ranks: Any, models: Path, out: Path, is_long: bool) -> dict[str, Any]:
    """Take optimizer steps with bad ones among them, and the same steps without those: whether one was skipped on this
    rank, which weights it changed, and whether the end is the same. Then optimizer state, schedule and gradients are
    untouched."""
    results = {}
    for stage, dtype, offload in SETTINGS:
        bad = run(stage, dtype, offload, ["", *KINDS, "", ""], ranks)
        end, other = bad.pop("end"), run(stage, dtype, offload, ["", "", ""], ranks)["end"]
        same = all(end[name].equal(other[name]) for name in end)
        finite = all(bool(weight.isfinite().all()) for weight in end.values())
        results[f"{dtype}_z{stage}{'_offload' * offload}"] = {**bad, "same": same, "finite": finite}
    return results


WEIGHTS = {"first.weight", "first.bias", "second.weight", "second.bias"}


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_bad_step_changes_nothing(launched, world_size: int) -> None:
    """Good, bad three times, good, good: only one micro-batch of the last rank goes wrong."""
    _, reports = launched("test_bad_steps", world_size)
    assert len(reports[0]) == 10
    for rank in reports:
        for name, seen in rank.items():
            assert seen["skipped"] == [False, True, True, True, False, False], name
            assert [set(moved) for moved in seen["moved"][1:4]] == [set(), set(), set()], name
            assert WEIGHTS == set(seen["moved"][0]) | set(seen["moved"][4]), name
            # the schedule waits too: the warm-up's second rate is that of the second good step
            assert seen["rates"][1] == seen["rates"][2] == seen["rates"][3] == seen["rates"][4] < seen["rates"][5], name
            assert seen["finite"] and seen["same"], name
