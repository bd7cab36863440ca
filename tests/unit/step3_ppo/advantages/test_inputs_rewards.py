"""The score lands on the last real token, the KL on every response token."""

from __future__ import annotations

import pytest
import torch

from training.step3_ppo.advantages.inputs import missing_eos_punishment, overlong_punishment, shaped_rewards


def test_by_hand():
    # Lengths 2 and 3 of R = 3, KL coefficient 0.1.
    kl_BR = torch.tensor([[1.0, 2.0, 99.0], [-1.0, 0.5, 3.0]])  # what is outside the response is not read
    rewards_BR = shaped_rewards(torch.tensor([1.5, -2.0]), kl_BR, torch.tensor([2, 3]), kl_coef=0.1)
    torch.testing.assert_close(rewards_BR, torch.tensor([[-0.1, 1.3, 0.0], [0.1, -0.05, -2.3]]))


def test_the_position_comes_from_lengths_so_an_end_token_that_is_also_pad_gets_the_score():
    """DeepSpeed-Chat counts ids != pad: with pad == eos it puts the reward where the loss is masked."""
    eos = pad = 2
    response_ids_BR = torch.tensor([[7, 8, eos, pad, pad], [eos, pad, pad, pad, pad], [7, 8, 9, 7, 8]])
    lengths_B = torch.tensor([3, 1, 5])
    rewards_BR = shaped_rewards(torch.tensor([1.0, 2.0, 3.0]), torch.zeros(3, 5), lengths_B, 0.1)
    assert rewards_BR.nonzero().tolist() == [[0, 2], [1, 0], [2, 4]]
    assert response_ids_BR[0, 2] == response_ids_BR[1, 0] == eos
    assert rewards_BR.sum(1).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_what_is_outside_may_be_anything(kl_coef):
    kl_BR = torch.tensor([[1.0, float("nan")], [1.0, float("inf")]])
    rewards_BR = shaped_rewards(torch.ones(2), kl_BR, torch.tensor([1, 1]), kl_coef)
    torch.testing.assert_close(rewards_BR, torch.tensor([[1.0 - kl_coef, 0.0]] * 2))


def test_a_missing_end_by_hand():
    assert missing_eos_punishment(torch.tensor([True, False]), 1.5).tolist() == [0.0, -1.5]


def test_the_soft_overlong_punishment_by_hand():
    # At most 20 tokens, the last 8 of them a buffer: free up to 12, then 1/8 a token.
    lengths_B = torch.tensor([1, 12, 13, 16, 19, 20, 25])
    want = [0.0, 0.0, -1 / 8, -4 / 8, -7 / 8, -1.0, -1.0]
    assert overlong_punishment(lengths_B, max_tokens=20, buffer_tokens=8).tolist() == want
    assert overlong_punishment(lengths_B, max_tokens=20, buffer_tokens=0).tolist() == [0.0] * 7
