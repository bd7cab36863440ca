"""PPO's clip, its two bounds and the dual clip, by hand."""

from __future__ import annotations

import pytest
import torch

from training.step3_ppo.losses.losses import PolicyLossSettings, PolicyTokens, ppo


def tokens_of(ratios: list[float], advantages: list[float]) -> PolicyTokens:
    old_M = torch.linspace(-3.0, -0.1, len(ratios))
    logprobs_M = (old_M + torch.tensor(ratios).log()).requires_grad_()
    return PolicyTokens(logprobs_M, old_M, torch.tensor(advantages), torch.zeros(len(ratios), dtype=torch.int64))


def test_by_hand():
    # clip 0.2.                         ratio  A   -A r   -A clip(r)  larger
    #   clipped: it would gain too much   1.5   2   -3.0     -2.4      -2.4
    #   not: the loss still grows         1.5  -2    3.0      2.4       3.0
    #   not: the gain is still small      0.5   2   -1.0     -1.6      -1.0
    #   clipped                           0.5  -2    1.0      1.6       1.6
    #   inside the range                  1.1   1   -1.1     -1.1      -1.1
    tokens = tokens_of([1.5, 1.5, 0.5, 0.5, 1.1], [2.0, -2.0, 2.0, -2.0, 1.0])
    loss_M, clipped_M = ppo(tokens, PolicyLossSettings(0.2, 0.2))
    torch.testing.assert_close(loss_M, torch.tensor([-2.4, 3.0, -1.0, 1.6, -1.1]))
    assert clipped_M.tolist() == [True, False, False, True, False]
    loss_M.sum().backward()  # -A r where free, 0 where the clip is in force
    torch.testing.assert_close(tokens.logprobs_M.grad, torch.tensor([0.0, 3.0, -1.0, 0.0, -1.1]))


def test_separate_bounds_by_hand():
    # low 0.1, high 0.4, A 1: -min(r, clip(r, 0.9, 1.4));  A -1: max(r, clip(r, 0.9, 1.4))
    tokens = tokens_of([1.3, 1.5, 0.85, 0.95], [1.0, 1.0, -1.0, -1.0])
    loss_M, clipped_M = ppo(tokens, PolicyLossSettings(clip_low=0.1, clip_high=0.4))
    torch.testing.assert_close(loss_M, torch.tensor([-1.3, -1.4, 0.9, 0.95]))
    assert clipped_M.tolist() == [False, True, True, False]


def test_the_dual_clip_by_hand():
    # c 3: where A < 0 the loss is at most -3 A; where A > 0 nothing changes.
    tokens = tokens_of([5.0, 2.0, 5.0], [-1.0, -1.0, 1.0])
    loss_M, clipped_M = ppo(tokens, PolicyLossSettings(0.2, 0.2, dual_clip=3.0))
    torch.testing.assert_close(loss_M, torch.tensor([3.0, 2.0, -1.2]))
    assert clipped_M.tolist() == [True, False, True]
    loss_M.sum().backward()
    torch.testing.assert_close(tokens.logprobs_M.grad, torch.tensor([0.0, 2.0, 0.0]))


def test_the_first_pass_has_the_policy_gradient():
    """At ratio 1 the gradient is that of -A log p, and nothing is clipped."""
    tokens = tokens_of([1.0, 1.0], [0.5, -3.0])
    loss_M, clipped_M = ppo(tokens, PolicyLossSettings(0.2, 0.2))
    loss_M.sum().backward()
    assert tokens.logprobs_M.grad.tolist() == [-0.5, 3.0] and not clipped_M.any()


@pytest.mark.parametrize("gap", [50.0, 1e4])
def test_a_policy_far_away_stays_finite(gap):
    logprobs_M = torch.tensor([0.0, -gap], requires_grad=True)
    old_M = torch.tensor([-gap, 0.0])
    tokens = PolicyTokens(logprobs_M, old_M, torch.tensor([-1.0, -1.0]), torch.zeros(2, dtype=torch.int64))
    loss_M, _ = ppo(tokens, PolicyLossSettings(0.2, 0.2))
    loss_M.sum().backward()
    assert torch.isfinite(loss_M).all() and torch.isfinite(logprobs_M.grad).all()
