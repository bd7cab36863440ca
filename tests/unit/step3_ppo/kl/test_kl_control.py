"""Control of the KL's coefficient."""

from __future__ import annotations

import pytest

from training.step3_ppo.kl import KlControl


def test_the_adaptive_controller_by_hand():
    # Target 6, horizon 1000, 100 responses an update.
    #   KL 6.6: error 0.1         0.2 x (1 + 0.1 x 0.1) = 0.202
    #   KL 60: error 9, cut 0.2   0.202 x 1.02 = 0.20604
    #   KL 0: error -1, cut -0.2  0.20604 x 0.98 = 0.2019192
    control = KlControl(0.2, target=6.0, horizon=1000.0)
    for kl, want in ((6.6, 0.202), (60.0, 0.20604), (0.0, 0.2019192)):
        control.update(kl, 100)
        assert control.kl_coef == pytest.approx(want)


def test_the_fixed_controller_stays():
    control = KlControl(0.3)
    control.update(100.0, 10)
    assert control.kl_coef == 0.3


def test_a_horizon_that_is_long_beside_the_run_is_named():
    # 5 horizons x 0.2 is a factor of e; half a horizon x 0.2 is exp(0.1) = 1.105.
    control = KlControl(0.2, target=6.0, horizon=1000.0)
    assert control.slow_warning(5000) is None
    assert "by 10.5% at most over the 500 responses" in control.slow_warning(500)
    assert KlControl(0.2).slow_warning(1) is None
