"""The measured peak: a plausible rate, and a random state that stays as it was."""

from __future__ import annotations

import pytest
import torch

from training.utils.engine import matmul_rate
from training.utils.engine.matmul_rate import measured_matmul_rate, peak_of_all_ranks
from training.utils.engine.startup import Ranks

CPU = torch.device("cpu")


def test_rate_is_the_fastest_blocks(monkeypatch):
    """A clock that stands still but for the blocks: 2 x 64^3 FLOPs in 1 ms at best."""
    monkeypatch.setitem(matmul_rate._SIZES, "cpu", 64)
    # Warm-up of two matmuls (4 ms), one to count by (50 ms: a block of 0.2 s / 4 takes one), then four blocks of one.
    blocks = iter([0.004, 0.050, 0.002, 0.001, 0.003, 0.002])
    times, now = [], 0.0
    for seconds in blocks:
        times += [now, now + seconds]
        now += seconds
    monkeypatch.setattr(matmul_rate.time, "perf_counter", lambda: times.pop(0))
    assert measured_matmul_rate(torch.float32, CPU) == pytest.approx(2 * 64**3 / 0.001)
    assert times == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measuring_leaves_the_random_state_alone(dtype, monkeypatch):
    monkeypatch.setitem(matmul_rate._SIZES, "cpu", 64)
    before = torch.get_rng_state()
    assert measured_matmul_rate(dtype, CPU, seconds=0.001) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_one_rank_is_all_ranks(monkeypatch):
    monkeypatch.setattr(matmul_rate, "measured_matmul_rate", lambda dtype, device: 5.0)
    assert peak_of_all_ranks(torch.float32, Ranks(0, 0, 1, CPU)) == 5.0
