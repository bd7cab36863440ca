"""Advantages have mean 0 and variance 1 over the tokens of all ranks."""

from __future__ import annotations

import pytest
import torch

from training.step3_ppo.advantages.estimators import moments, whiten


def test_two_ranks_are_whitened_as_one():
    generator = torch.Generator().manual_seed(0)
    ranks = []
    for mean, lengths in ((3.0, [4, 1, 7]), (-1.0, [5])):
        advantages = torch.randn(len(lengths), 8, generator=generator) + mean
        inside = torch.arange(8) < torch.tensor(lengths)[:, None]
        ranks.append((advantages, inside))
    total = sum(moments(*rank) for rank in ranks)
    white = [whiten(*rank, total) for rank in ranks]
    union = torch.cat([result[inside] for result, (_, inside) in zip(white, ranks, strict=True)])
    assert union.mean().item() == pytest.approx(0, abs=1e-6)
    assert union.var(unbiased=True).item() == pytest.approx(1, abs=1e-5)
    for result, (_, inside) in zip(white, ranks, strict=True):
        assert not result[~inside].any()
    # Whitened alone, each rank would have lost what sets it apart from the other.
    assert white[0][ranks[0][1]].mean() > 0.2 > -0.2 > white[1][ranks[1][1]].mean()


def test_by_hand():
    # 1, 3, 5 (and 100 outside): mean 3, variance 8 / 2 = 4.
    advantages, inside = torch.tensor([[1.0, 3.0], [5.0, 100.0]]), torch.tensor([[True, True], [True, False]])
    assert moments(advantages, inside).tolist() == [3.0, 9.0, 35.0]
    torch.testing.assert_close(
        whiten(advantages, inside, moments(advantages, inside)), torch.tensor([[-1.0, 0.0], [1.0, 0.0]])
    )


@pytest.mark.parametrize("values", [[7.0], [0.1, 0.1, 0.1], [1e4, 1e4]], ids=["one", "equal", "large"])
def test_one_token_and_equal_tokens_become_zero(values):
    advantages = torch.tensor([values])
    inside = torch.ones_like(advantages, dtype=torch.bool)
    torch.testing.assert_close(
        whiten(advantages, inside, moments(advantages, inside)), torch.zeros_like(advantages), rtol=0, atol=1e-3
    )


def test_a_rank_without_tokens():
    advantages, nothing = torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.bool)
    assert moments(advantages, nothing).tolist() == [0.0, 0.0, 0.0]
    assert whiten(advantages, nothing, torch.tensor([3.0, 9.0, 35.0])).tolist() == [[0.0, 0.0]]
    assert whiten(advantages, nothing, torch.zeros(3)).tolist() == [[0.0, 0.0]]


def test_large_means_keep_their_spread():
    """Float32 sums of squares would lose a spread of 1 around 10,000."""
    advantages = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)) + 1e4
    inside = torch.ones_like(advantages, dtype=torch.bool)
    white = whiten(advantages, inside, moments(advantages, inside))
    assert white.std().item() == pytest.approx(1, abs=1e-3)
    assert white.mean().item() == pytest.approx(0, abs=1e-3)


def test_what_differs_by_rounding_alone_is_not_blown_up():
    """Rewards that are all 0 but for the KL of a policy that still is its reference."""
    inside = torch.ones(2, 3, dtype=torch.bool)
    noise = torch.tensor([[1e-8, -2e-8, 0.0], [3e-8, 1e-8, -1e-8]])
    assert not whiten(noise, inside, moments(noise, inside)).any()
    small = 1e3 * noise
    assert whiten(small, inside, moments(small, inside)).all()
