"""KL estimators against the divergence they estimate, and the controllers of the coefficient."""

from __future__ import annotations

import math

import pytest
import torch

from training.step3_ppo.kl import KL_ESTIMATORS, AdaptiveKl, FixedKl, full_kl, k1, k3


@pytest.fixture
def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of two distributions over 8 tokens, float64."""
    generator = torch.Generator().manual_seed(0)
    p_logits, q_logits = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    return p_logits, q_logits


def test_by_hand():
    # log p - log p_ref = 1 and -0.5.
    logprobs, ref = torch.tensor([-1.0, -2.5]), torch.tensor([-2.0, -2.0])
    expected = {
        "k1": [1.0, -0.5],
        "k2": [0.5, 0.125],
        "k3": [math.exp(-1.0) + 1.0 - 1.0, math.exp(0.5) - 0.5 - 1.0],
        "abs": [1.0, 0.5],
    }
    assert expected.keys() == KL_ESTIMATORS.keys()
    for name, want in expected.items():
        assert KL_ESTIMATORS[name](logprobs, ref).tolist() == pytest.approx(want)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_have_the_divergence_as_their_mean(name, distributions):
    p, q = (logits.log_softmax(-1) for logits in distributions)
    # Its expectation over tokens drawn from p, exactly: sum p (log p - log q).
    exact = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")
    torch.testing.assert_close((p.exp() * KL_ESTIMATORS[name](p, q)).sum(), exact)
    assert (k3(p, q) >= 0).all() and (k1(p, q) < 0).any()


def test_as_a_loss_k1_pulls_nowhere_and_k2_as_the_divergence_does(distributions):
    p_logits, q_logits = distributions

    def gradient(name: str) -> torch.Tensor:
        """The mean over tokens drawn from p of the estimator's gradient; drawing has none."""
        logits = p_logits.clone().requires_grad_()
        p, q = logits.log_softmax(-1), q_logits.log_softmax(-1)
        (p.detach().exp() * KL_ESTIMATORS[name](p, q)).sum().backward()
        return logits.grad

    logits = p_logits.clone().requires_grad_()
    full_kl(logits[None], q_logits[None]).sum().backward()
    torch.testing.assert_close(gradient("k1"), torch.zeros(8, dtype=torch.float64))
    torch.testing.assert_close(gradient("k2"), logits.grad)


def test_k3_stays_finite_where_the_policies_are_far_apart():
    logprobs = torch.tensor([-500.0], requires_grad=True)
    value = k3(logprobs, torch.tensor([-1.0]))
    value.sum().backward()
    assert torch.isfinite(value).all() and torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_the_sum_over_the_vocabulary(chunk):
    logits_MV, ref_MV = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want_M = torch.nn.functional.kl_div(
        ref_MV.log_softmax(-1), logits_MV.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    torch.testing.assert_close(full_kl(logits_MV, ref_MV, chunk), want_M)
    assert full_kl(logits_MV[:0], ref_MV[:0]).shape == (0,)
    assert full_kl(logits_MV.bfloat16(), ref_MV.bfloat16()).dtype == torch.float32


def test_the_adaptive_controller_by_hand():
    # Target 6, horizon 1000, 100 responses an update.
    #   KL 6.6: error 0.1         0.2 x (1 + 0.1 x 0.1) = 0.202
    #   KL 60: error 9, cut 0.2   0.202 x 1.02 = 0.20604
    #   KL 0: error -1, cut -0.2  0.20604 x 0.98 = 0.2019192
    control = AdaptiveKl(0.2, target=6.0, horizon=1000.0)
    for kl, want in ((6.6, 0.202), (60.0, 0.20604), (0.0, 0.2019192)):
        control.update(kl, 100)
        assert control.coefficient == pytest.approx(want)


@pytest.mark.parametrize("make", [lambda: FixedKl(0.3), lambda: AdaptiveKl(0.3, 2.0, 50.0)])
def test_state_goes_into_a_fresh_controller(make):
    control = make()
    control.update(5.0, 10)
    fresh = make()
    fresh.load_state_dict(control.state_dict())
    for one in (control, fresh):
        one.update(0.5, 10)
    assert fresh.coefficient == control.coefficient


def test_the_fixed_controller_stays():
    control = FixedKl(0.3)
    control.update(100.0, 10)
    assert control.coefficient == 0.3
