"""Collectives beside what was measured, and ZeRO's bytes by its paper."""

from __future__ import annotations

import pytest

from threestep.plugins.plan.clock.devices import DEVICES
from threestep.plugins.plan.clock.traffic import gather_seconds, zero_traffic


@pytest.mark.parametrize(
    ("device", "ranks", "size", "bus"),
    [("h200", 8, 2**20, 40), ("h200", 8, 2**26, 347), ("b200", 32, 2**28, 229), ("b200", 32, 2**30, 362)],
)
def test_it_is_near_measured_all_reduces(device, ranks, size, bus):
    """Bus bandwidths in GB/s of all-reduces of `size` bytes (stas00/ml-engineering 744d01e, network pages), which are
    a reduction that scatters and a gather."""
    measured = size * 2 * (ranks - 1) / ranks / (bus * 1e9)
    assert 2 * gather_seconds(size, ranks, DEVICES[device]) == pytest.approx(measured, rel=0.4)


def test_bytes_of_stages():
    """Stages 0 to 2 move twice the weights in a step of one micro-batch, stage 3 three times (arXiv 1910.02054)."""
    for stage, times in ((0, 2), (1, 2), (2, 2), (3, 3)):
        assert sum(zero_traffic(5.0, 5.0, stage)) == times * 5.0
    assert zero_traffic(5.0, 5.0, 2).reduced == zero_traffic(5.0, 5.0, 1).reduced_once == 5.0
