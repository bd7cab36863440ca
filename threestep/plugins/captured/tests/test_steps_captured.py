"""A captured step on a CPU, where it is an ordinary call; `tests/gpu` captures."""

from __future__ import annotations

import torch

from threestep.plugins.captured.steps import CapturedStep


def test_on_a_cpu_each_call_is_an_ordinary_one():
    place, calls = torch.zeros(2), []

    def function() -> torch.Tensor:
        calls.append(1)
        return place + 1

    step = CapturedStep(function, torch.device("cpu"))
    assert calls == []
    place.fill_(3.0)
    assert step().tolist() == [4.0, 4.0]
    place.add_(1.0)
    assert CapturedStep(function, torch.device("cpu"), step)().tolist() == [5.0, 5.0] and len(calls) == 2
