"""Advantages from returns: REINFORCE++ and ReMax. B responses, R their tokens one after the other."""

from __future__ import annotations

import numpy as np


def to_go(rewards_R: np.ndarray, lengths_B: np.ndarray, gamma: float) -> np.ndarray:
    """G_t = r_t + gamma G_t+1 within each response (Sutton and Barto 2018, equation 3.9). 1 and 2, gamma 1/2: 2 and
    2."""
    found_R, end = np.zeros(len(rewards_R)), 0
    for length in lengths_B:
        begin, end = end, end + int(length)
        running = 0.0
        for t in range(end - 1, begin - 1, -1):
            running = rewards_R[t] + gamma * running
            found_R[t] = running
    return found_R


def remax(rewards_R: np.ndarray, lengths_B: np.ndarray, greedy_B: np.ndarray) -> np.ndarray:
    """G_t - the score of the greedy response (Li et al. 2024, algorithm 1). One token, reward 1, greedy 0.25: 0.75."""
    return to_go(rewards_R, lengths_B, 1.0) - np.repeat(greedy_B, lengths_B)
