"""The table of devices is in itself right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from training.utils.clock.devices import DEVICES, HostCosts, Measured, read_device

MEASURED = Measured(((1e3, 1e9), (1e5, 3e9)), HostCosts(1e-5, 5e-6, 1e-3), 1e8, 2e9, ((1.0, 1e9),), 1e9)


@pytest.mark.parametrize("name", DEVICES)
def test_what_was_reached_lies_below_the_peak(name):
    device = DEVICES[name]
    for rates in (device.half, device.eighth):
        assert 0 <= rates.reached < rates.peak or rates.peak == rates.reached == 0
    assert 0 < device.attention.backward < device.attention.forward < 1
    assert device.links.between <= device.links.within and device.source and device.is_cuda
    assert device.single < device.half.peak


def test_rates_lie_between_measured_sizes():
    """Half way between 1e3 and 1e5 by the logarithm is 1e4; beyond the ends they stay."""
    assert MEASURED.matmul_rate(1e4) == pytest.approx(2e9)
    assert (MEASURED.matmul_rate(10.0), MEASURED.matmul_rate(1e9)) == (1e9, 3e9)
    assert MEASURED.matmul_rate(1e5) == 3e9


def test_a_file_gives_the_device_back():
    device = replace(DEVICES["h100"], measured=MEASURED)
    assert read_device(device.as_json()) == device
    assert read_device(DEVICES["a100"].as_json()) == DEVICES["a100"]
    for text in ("[]", "{}", "no"):
        with pytest.raises((KeyError, TypeError, ValueError)):
            read_device(text)
