"""KL estimators."""

from __future__ import annotations

import torch

from training.step3_ppo.kl import k1


def test_k1_is_the_difference_and_its_mean_the_divergence():
    generator = torch.Generator().manual_seed(0)
    p_logits, q_logits = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    p, q = p_logits.log_softmax(-1), q_logits.log_softmax(-1)
    # Its expectation over tokens drawn from p, exactly: sum p (log p - log q).
    exact = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")
    torch.testing.assert_close((p.exp() * k1(p, q)).sum(), exact)
    assert k1(torch.tensor([-2.0]), torch.tensor([-1.0])).tolist() == [-1.0]  # negative at times
