"""The table of devices is in itself right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from threestep.plugins.plan.clock.devices import DEVICES, HostCosts, Measured, read_device

WIDTHS = ((10.0, ((100.0, 1e9), (10_000.0, 3e9))), (1000.0, ((1000.0, 8e9),)))
MEASURED = Measured(
    WIDTHS,
    HostCosts(((1e3, 1e-5), (1e5, 3e-5)), ((1e3, 5e-6), (1e5, 7e-6)), 1e-3, document=(2e-5, 4e-5), token=(1e-4, 1e-9)),
    ((1e3, 1e9), (1e5, 3e9)),
    2e9,
    ((1e6, ((1.0, 1e9),)), (1e8, ((1.0, 5e9),))),
    1e9,
    (((1e3, 2e9), (1e5, 4e9)), ((1e3, 6e9),)),
    ((1.0, 2e-6), (100.0, 4e-6)),
)


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
    assert MEASURED.optimizer_rate(1e4) == pytest.approx(2e9)
    assert (MEASURED.optimizer_rate(10.0), MEASURED.optimizer_rate(1e9)) == (1e9, 3e9)
    assert MEASURED.optimizer_rate(1e5) == 3e9
    assert [MEASURED.thin_rate(weights, 7.0) for weights in (1.0, 1e7, 1e9)] == pytest.approx([1e9, 3e9, 5e9])
    assert MEASURED.thin_product_seconds(10.0) == pytest.approx(3e-6)


def test_an_operators_seconds_and_rate_are_those_of_its_bytes():
    assert [MEASURED.launch_seconds(size) for size in (0.0, 1e4, 1e9)] == pytest.approx([1e-5, 2e-5, 3e-5])
    assert MEASURED.launch_seconds(1e4, backward=True) == pytest.approx(6e-6)
    assert MEASURED.memory_rate(1e4) == pytest.approx(3e9) and MEASURED.memory_rate(1e4, backward=True) == 6e9


def test_a_products_rate_is_that_of_its_width_and_its_longest_side():
    """1,000 rows of 10 x 10: half way between 100 and 10,000 rows. A width of 100, the mean of 10 and 1,000 by the
    logarithm, lies half way between the 2 there and the 8."""
    for sides in ((1000, 10, 10), (10, 1000, 10), (10, 10, 1000)):
        assert MEASURED.matmul_rate(*sides) == pytest.approx(2e9)
    assert MEASURED.matmul_rate(1000, 10, 1000) == MEASURED.matmul_rate(100, 1000, 100) == pytest.approx(5e9)
    assert (MEASURED.matmul_rate(2, 2, 2), MEASURED.matmul_rate(9999, 9999, 9999)) == (1e9, 8e9)


def test_a_file_gives_the_device_back():
    device = replace(DEVICES["h100"], measured=MEASURED)
    assert read_device(device.as_json()) == device
    assert read_device(DEVICES["a100"].as_json()) == DEVICES["a100"]
    for text in ("[]", "{}", "no"):
        with pytest.raises((KeyError, TypeError, ValueError)):
            read_device(text)
