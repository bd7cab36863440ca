"""The table of devices is in itself right."""

from __future__ import annotations

import pytest

from training.utils.clock.devices import DEVICES


@pytest.mark.parametrize("name", DEVICES)
def test_what_was_reached_lies_below_the_peak(name):
    device = DEVICES[name]
    for rates in (device.half, device.eighth):
        assert 0 <= rates.reached < rates.peak or rates.peak == rates.reached == 0
    assert 0 < device.attention.backward < device.attention.forward < 1
    assert device.links.between <= device.links.within and device.source and device.is_cuda
    assert device.single < device.half.peak
