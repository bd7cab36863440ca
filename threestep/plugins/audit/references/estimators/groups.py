"""Advantages from rewards. B responses, R their tokens one after the other."""

from __future__ import annotations

import numpy as np


def group_mean(values_B: np.ndarray, group_B: np.ndarray) -> np.ndarray:
    """Each response's mean over its group."""
    _, place_B = np.unique(group_B, return_inverse=True)
    return (np.bincount(place_B, values_B) / np.bincount(place_B))[place_B]


def group_std(values_B: np.ndarray, group_B: np.ndarray, ddof: float) -> np.ndarray:
    """Each response's standard deviation over its group, with the denominator n - ddof; 0 in a group of one."""
    _, place_B = np.unique(group_B, return_inverse=True)
    sizes_B = np.bincount(place_B)[place_B]
    squares_B = group_mean((values_B - group_mean(values_B, group_B)) ** 2, group_B) * sizes_B
    return np.sqrt(squares_B / np.maximum(sizes_B - ddof, 1.0))


def grpo(outcome_B: np.ndarray, group_B: np.ndarray, std_B: np.ndarray | float, epsilon: float) -> np.ndarray:
    """(R - mean of the group) / (std + epsilon) (Shao et al. 2024, section 4.1.2).

    Worked example, outcomes 1 and 0, ddof 1: (1 - 1/2) / sqrt(1/2) = 0.7071, and -0.7071.
    """
    return (outcome_B - group_mean(outcome_B, group_B)) / (std_B + epsilon)


def rloo(outcome_B: np.ndarray, group_B: np.ndarray) -> np.ndarray:
    """R - mean of the others (Kool et al. 2019; Ahmadian et al. 2024, equation 10): n / (n - 1) (R - mean); 0 for a
    group of one. Outcomes 1 and 0: 1 and -1."""
    _, place_B = np.unique(group_B, return_inverse=True)
    sizes_B = np.bincount(place_B)[place_B]
    return (outcome_B - group_mean(outcome_B, group_B)) * sizes_B / np.maximum(sizes_B - 1, 1)


def gae(
    rewards_R: np.ndarray, values_R: np.ndarray, lengths_B: np.ndarray, *, gamma: float, lam: float, **after: np.ndarray
) -> np.ndarray:
    """A_t = delta_t + gamma lam A_t+1, delta_t = r_t + gamma V_t+1 - V_t (Schulman et al. 2016, equations 11 to 16).

    after: `last_B`, the value after each response's last token; 0 without it: the episode is over.
    Worked example, one token, reward 1, value 0.25: 0.75.
    """
    last_B = after.get("last_B", np.zeros(len(lengths_B)))
    advantages_R, end = np.zeros(len(rewards_R)), 0
    for length, last in zip(lengths_B, last_B, strict=True):
        begin, end = end, end + int(length)
        next_value, running = float(last), 0.0
        for t in range(end - 1, begin - 1, -1):
            running = rewards_R[t] + gamma * next_value - values_R[t] + gamma * lam * running
            next_value, advantages_R[t] = values_R[t], running
    return advantages_R


def whitened(values_R: np.ndarray, counts_R: np.ndarray, ddof: float = 1.0, more_zeros: float = 0.0) -> np.ndarray:
    """(A - mean) / std over what counts, 0 elsewhere (as PPO's implementations: Huang et al. 2022, detail 7).

    more_zeros: that are counted too, as padding is by mistake. Values 1 and 3: -0.7071 and 0.7071.
    """
    taken = values_R[counts_R]
    count = len(taken) + more_zeros
    if count < 2:
        return np.zeros_like(values_R)
    mean = taken.sum() / count
    variance = (((taken - mean) ** 2).sum() + more_zeros * mean**2) / (count - ddof)
    if variance <= 1e-12:
        return np.zeros_like(values_R)
    return np.where(counts_R, (values_R - mean) / np.sqrt(variance + 1e-8), 0.0)
