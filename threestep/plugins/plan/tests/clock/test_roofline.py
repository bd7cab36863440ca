"""Seconds of single operators by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from threestep.plugins.plan.clock.devices import AttentionShares, Device, Links, Rates, Tiles
from threestep.plugins.plan.clock.roofline import MEMORY_SHARE, matmul_rates, matmul_seconds, used_share, work_seconds
from threestep.plugins.plan.clock.work import Matmul, Work
from threestep.plugins.plan.tests.flat_cpu import flat, host_costs

DEVICE = Device(
    Rates(100, 80),
    80,
    1000,
    AttentionShares(0.5, 0.25),
    Links(100, 10, 10),
    Tiles(4, 128, 256),
    "by hand",
    Rates(200),
    50,
)


def test_the_last_round_of_tiles_and_the_edges_count():
    """Four tiles of 128 x 256 fill four processors; five take two rounds, unless smaller tiles fill them better."""
    assert used_share(Matmul(1, 512, 256, 64), DEVICE) == 1.0
    assert used_share(Matmul(1, 1, 256, 64), DEVICE) == pytest.approx(256 / (4 * 64 * 128))
    assert used_share(Matmul(4, 128, 256, 64), DEVICE) == 1.0


def test_a_matmul_takes_as_long_as_its_slower_side():
    large = Matmul(1, 8192, 8192, 8192)
    assert matmul_seconds(large, DEVICE, "bf16") == pytest.approx(2 * 8192**3 / 80e12)
    assert matmul_seconds(large, DEVICE, "fp8") == pytest.approx(2 * 8192**3 / (0.8 * 200e12))
    assert matmul_seconds(large, DEVICE, "fp32") == pytest.approx(2 * 8192**3 / (0.8 * 50e12))
    thin = Matmul(1, 1, 8192, 8192)
    read = 2 * (8192**2 + 2 * 8192) / (MEMORY_SHARE * 1e12)
    assert matmul_seconds(thin, DEVICE, "bf16") == pytest.approx(read)


def test_devices_without_8_bits_compute_them_in_16():
    assert matmul_rates(replace(DEVICE, eighth=Rates(0)), "fp8") == DEVICE.half


def test_kinds_of_work_stand_apart():
    work = Work(Counter(), attention_flops=1e12, moved_bytes=9e9, fused_bytes=9e8, launches=100)
    forward = work_seconds(work, DEVICE)
    assert forward.attention == pytest.approx(1 / 50) and forward.memory == pytest.approx(0.01)
    assert forward.launches == pytest.approx(1e-3) and forward.device == pytest.approx(0.03)
    assert work_seconds(work, DEVICE, backward=True).attention == pytest.approx(1 / 25)
    assert work_seconds(work, DEVICE, fused=True).memory == pytest.approx(0.001)
    assert forward.running_at(0.5).device == pytest.approx(0.06)


def test_a_cpu_alone_computes_attention_document_by_document():
    """3 tensors put together, of 2e-5 seconds each, 2 further documents of 5e-5, or as an operator, 1,000 bytes at the
    memory's 1e12 a second, and 5e10 FLOPs at a quarter of the matmul peak of 100e12."""
    work = Work(apart_documents=2, apart_launches=3, apart_bytes=1000.0, apart_flops=5e10)
    costs = host_costs(1e-5, 2e-5, document=(0.0, 5e-5))
    found = work_seconds(work, replace(DEVICE, measured=flat(1e9, costs)), backward=True)
    forward = work_seconds(work, replace(DEVICE, measured=flat(1e9, costs)))
    assert (
        forward.launches == pytest.approx(3e-5 + 2e-5)
        and found.launches == pytest.approx(6e-5 + 1e-4)
        and found.memory == pytest.approx(1e-9)
    )
    assert found.attention == pytest.approx(2e-3)
    assert work_seconds(work, DEVICE, backward=True).device == work_seconds(work, DEVICE).launches == 0.0
