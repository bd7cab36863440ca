"""On every rank: optimizer steps with a bad one among them, and the same steps without it, at every ZeRO stage.

A step is bad where one micro-batch of one rank has a loss of NaN, an infinite loss, or a finite loss whose gradient is
NaN. Reports whether the step was skipped on this rank, which weights it changed, and whether the steps after it end
with the very weights of a run that never saw it: optimizer state, schedule and gradients are then untouched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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
    from training.utils.engine.config.arguments import EngineSettings
    from training.utils.engine.ranks.startup import DTYPES
    from training.utils.engine.training_engine import TrainingEngine

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


def main() -> None:
    from tests.distributed.launch import report
    from training.utils.engine.ranks.startup import started_process_group

    results = {}
    with started_process_group() as ranks:
        for stage, dtype, offload in SETTINGS:
            bad = run(stage, dtype, offload, ["", *KINDS, "", ""], ranks)
            never = run(stage, dtype, offload, ["", "", ""], ranks)
            end, other = bad.pop("end"), never["end"]
            same = all(end[name].equal(other[name]) for name in end)
            finite = all(bool(weight.isfinite().all()) for weight in end.values())
            results[f"{dtype}_z{stage}{'_offload' * offload}"] = {**bad, "same": same, "finite": finite}
    report(results)


if __name__ == "__main__":
    main()
