"""KL estimators against the divergence they estimate, and control of the KL's coefficient."""

from __future__ import annotations

import math

import pytest
import torch

from training.step3_ppo.kl import KL_ESTIMATORS, KlControl
from training.step3_ppo.kl.estimators import full_kl, k1, k3


@pytest.fixture
def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of two distributions over 8 tokens, float64."""
    generator = torch.Generator().manual_seed(0)
    p_logits, q_logits = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    return p_logits, q_logits


def test_by_hand():
    # log p - log p_ref = 1 and -0.5.
    logprobs, ref = torch.tensor([[-1.0, -2.5], [-2.0, -2.0]], dtype=torch.float64)
    expected = {
        "k1": [1.0, -0.5],
        "k2": [0.5, 0.125],
        "k3": [math.exp(-1.0) + 1.0 - 1.0, math.exp(0.5) - 0.5 - 1.0],
        "abs": [1.0, 0.5],
    }
    expected |= {f"{name}+": expected[name] for name in ("k1", "k3", "abs")}
    assert expected.keys() == {name for name, entry in KL_ESTIMATORS.items() if not entry.of_logits}
    for name, want in expected.items():
        assert KL_ESTIMATORS[name].estimate(logprobs, ref).tolist() == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_have_the_divergence_as_their_mean(name, distributions):
    p, q = (logits.log_softmax(-1) for logits in distributions)
    # Its expectation over tokens drawn from p, exactly: sum p (log p - log q).
    exact = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")
    torch.testing.assert_close((p.exp() * KL_ESTIMATORS[name].estimate(p, q)).sum(), exact)
    assert (k3(p, q) >= 0).all() and (k1(p, q) < 0).any()


def test_as_a_loss_k1_pulls_nowhere_and_k2_as_the_divergence_does(distributions):
    p_logits, q_logits = distributions

    def gradient(name: str) -> torch.Tensor:
        """The mean over tokens drawn from p of the estimator's gradient; drawing has none."""
        logits = p_logits.clone().requires_grad_()
        p, q = logits.log_softmax(-1), q_logits.log_softmax(-1)
        (p.detach().exp() * KL_ESTIMATORS[name].estimate(p, q)).sum().backward()
        return logits.grad

    logits = p_logits.clone().requires_grad_()
    full_kl(logits[None], q_logits[None]).sum().backward()
    torch.testing.assert_close(gradient("k1"), torch.zeros(8, dtype=torch.float64))
    for name in ("k2", "k1+", "k3+", "abs+"):
        torch.testing.assert_close(gradient(name), logits.grad)


def test_k3_is_bounded_as_verl_bounds_it():
    """d = log p_ref - log p. By hand: d = 2 gives e^2 - 3 = 4.389 with the gradient 1 - e^2 for log p; d = -3 gives
    e^-3 + 2 = 2.050 and 1 - e^-3. d = 2.7 (e^2.7 - 3.7 = 11.2), 30, 499 and -12 (e^-12 + 11) lie at the bound."""
    d = torch.tensor([2.0, -3.0, 2.7, 30.0, 499.0, -12.0], dtype=torch.float64)
    logprobs = (-1.0 - d).requires_grad_()
    value = k3(logprobs, torch.full_like(d, -1.0))
    value.sum().backward()
    assert value.tolist() == pytest.approx([math.exp(2) - 3, math.exp(-3) + 2, 10, 10, 10, 10])
    assert logprobs.grad.tolist() == pytest.approx([1 - math.exp(2), 1 - math.exp(-3), 0, 0, 0, 0])


@pytest.mark.parametrize("name", ["k1", "k3", "abs"])
def test_a_plus_is_the_value_of_one_and_the_gradient_of_k2(name):
    """For log p, k2's gradient is log p - log p_ref, also where k3 is at its bound."""
    logprobs = torch.tensor([-1.0, -3.0, -31.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-2.0, -2.5, -1.0], dtype=torch.float64)
    value = KL_ESTIMATORS[f"{name}+"].estimate(logprobs, ref)
    assert torch.equal(value, KL_ESTIMATORS[name].estimate(logprobs, ref))
    value.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([1.0, -0.5, -30.0])


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_the_sum_over_the_vocabulary(chunk):
    logits_MV, ref_MV = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want_M = torch.nn.functional.kl_div(
        ref_MV.log_softmax(-1), logits_MV.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    torch.testing.assert_close(full_kl(logits_MV, ref_MV, chunk), want_M)
    assert full_kl(logits_MV[:0], ref_MV[:0]).shape == (0,)
    assert full_kl(logits_MV.bfloat16(), ref_MV.bfloat16()).dtype == torch.float32


def test_a_difference_that_is_rounding_has_no_gradient():
    """|d| itself pulls with +1 or -1 at 1e-8: at the start of a run, where both policies are one."""
    d = torch.tensor([0.0, 1e-8, -1e-8, 1e-6, 5e-4, -5e-4, 1e-3, -2e-3, 3.0], dtype=torch.float64, requires_grad=True)
    value = KL_ESTIMATORS["abs"].estimate(d, torch.zeros_like(d))
    value.sum().backward()
    expected = [0.0, 1e-10, -1e-10, 1e-6, 0.25, -0.25, 1.0, -1.0, 1.0]  # (d / 1e-3)^2, below 1e-3
    torch.testing.assert_close(d.grad, torch.tensor(expected, dtype=torch.float64))
    assert torch.equal(value, d.abs())


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
    assert "by at most 10.5% over the 500 responses" in control.slow_warning(500)
    assert KlControl(0.2).slow_warning(1) is None
