"""The measured peak: a plausible rate, and a random state that stays as it was."""

from __future__ import annotations

import pytest
import torch

from training.utils.engine.ranks import devices
from training.utils.engine.ranks.devices import measured_matmul_rate, peak_of_all_ranks

CPU = torch.device("cpu")


def test_rate_is_that_of_the_fastest_matmul(monkeypatch):
    """A clock that moves in matmuls alone: 2 x 64^3 FLOPs in 50 ms at best, warm-up not counted."""
    monkeypatch.setitem(devices._SIZES, "cpu", (64,))
    # Three to warm up, then 80 + 50 + 70 + 60 ms: with the fourth, 0.25 s have passed.
    times, now = [], 0.0
    for seconds in (0.01, 0.02, 0.01, 0.080, 0.050, 0.070, 0.060):
        times += [now, now + seconds]
        now += seconds
    monkeypatch.setattr(devices.time, "perf_counter", lambda: times.pop(0))
    assert measured_matmul_rate(torch.float32, CPU, seconds=0.25) == pytest.approx(2 * 64**3 / 0.050)
    assert times == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measuring_leaves_the_random_state_alone(dtype, monkeypatch):
    monkeypatch.setitem(devices._SIZES, "cpu", (64,))
    before = torch.get_rng_state()
    assert measured_matmul_rate(dtype, CPU, seconds=0.001) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_one_rank_is_all_ranks(monkeypatch):
    monkeypatch.setattr(devices, "measured_matmul_rate", lambda dtype, device: 5.0)
    assert peak_of_all_ranks(torch.float32, CPU) == 5.0
