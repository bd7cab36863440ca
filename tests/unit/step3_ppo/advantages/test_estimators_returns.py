"""GAE against a table worked by hand and its definition as a sum."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.step3_ppo.advantages.estimators import gae as estimate
from training.step3_ppo.advantages.inputs import AdvantageInputs, AdvantageSettings


def gae(rewards_BR, values_BR, lengths_B, gamma: float, lam: float):
    group_B = torch.arange(len(lengths_B))
    return estimate(AdvantageInputs(rewards_BR, lengths_B, group_B, values_BR), AdvantageSettings(gamma, lam, True))


def test_the_table_worked_by_hand():
    # gamma 0.9, lambda 0.5, gamma lambda 0.45; the value after the last token is 0.
    #   t   r     V    V'    delta = r + 0.9 V' - V          A = delta + 0.45 A'            return = A + V
    #   3   1.0  0.2   0      1.0 + 0    - 0.2 =  0.80       0.80                            1.0
    #   2   0.3  0.6  0.2     0.3 + 0.18 - 0.6 = -0.12      -0.12 + 0.360  =  0.2400         0.84
    #   1  -0.2  0.4  0.6    -0.2 + 0.54 - 0.4 = -0.06      -0.06 + 0.108  =  0.0480         0.448
    #   0   0.1  0.5  0.4     0.1 + 0.36 - 0.5 = -0.04      -0.04 + 0.0216 = -0.0184         0.4816
    # The second response has the same numbers and ends after two tokens:
    #   1  -0.2  0.4   0     -0.2 + 0    - 0.4 = -0.60      -0.60                           -0.2
    #   0   0.1  0.5  0.4                        -0.04      -0.04 - 0.27   = -0.31           0.19
    rewards_BR = torch.tensor([[0.1, -0.2, 0.3, 1.0]] * 2)
    values_BR = torch.tensor([[0.5, 0.4, 0.6, 0.2]] * 2)
    advantages_BR, returns_BR = gae(rewards_BR, values_BR, torch.tensor([4, 2]), gamma=0.9, lam=0.5)
    torch.testing.assert_close(
        advantages_BR, torch.tensor([[-0.0184, 0.048, 0.24, 0.8], [-0.31, -0.6, 0.0, 0.0]]), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(
        returns_BR, torch.tensor([[0.4816, 0.448, 0.84, 1.0], [0.19, -0.2, 0.0, 0.0]]), rtol=0, atol=1e-6
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 1), st.integers(0, 999))
def test_the_definition_as_a_sum(lengths, gamma, lam, seed):
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, in float64, for responses of any lengths."""
    width = max(lengths)
    rewards_BR, values_BR = torch.randn(
        2, len(lengths), width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    advantages_BR, returns_BR = gae(rewards_BR, values_BR, torch.tensor(lengths), gamma, lam)
    for row, length in enumerate(lengths):
        rewards, values = rewards_BR[row].tolist(), values_BR[row, :length].tolist() + [0.0]
        for t in range(width):
            expected = sum(
                (gamma * lam) ** (k - t) * (rewards[k] + gamma * values[k + 1] - values[k]) for k in range(t, length)
            )
            assert advantages_BR[row, t].item() == pytest.approx(expected, abs=1e-9)
            assert returns_BR[row, t].item() == pytest.approx(expected + (values[t] if t < length else 0), abs=1e-9)


def test_what_lies_outside_a_response_is_not_read():
    rewards_BR = torch.tensor([[1.0, float("nan")]])
    values_BR = torch.tensor([[0.5, float("inf")]])
    advantages_BR, returns_BR = gae(rewards_BR, values_BR, torch.tensor([1]), 1.0, 1.0)
    assert advantages_BR.tolist() == [[0.5, 0.0]] and returns_BR.tolist() == [[1.0, 0.0]]


def test_arguments_keep_their_values():
    rewards_BR, values_BR = torch.ones(1, 3), torch.ones(1, 3)
    gae(rewards_BR, values_BR, torch.tensor([2]), 0.9, 0.5)
    assert rewards_BR.tolist() == values_BR.tolist() == [[1.0] * 3]
