"""Rewards of tokens. B responses, R their tokens one after the other."""

from __future__ import annotations

import numpy as np


def at_ends(scores_B: np.ndarray, lengths_B: np.ndarray, back: int = 0) -> np.ndarray:
    """Return [R], each score at its response's last token, or `back` tokens before it; 0 elsewhere."""
    rewards_R = np.zeros(int(lengths_B.sum()))
    places_B = np.cumsum(lengths_B) - 1 - np.minimum(back, lengths_B - 1)
    rewards_R[places_B] = scores_B
    return rewards_R


def shaped(scores_B: np.ndarray, kl_R: np.ndarray, lengths_B: np.ndarray, kl_coef: float) -> np.ndarray:
    """The score at the end - kl_coef x KL at each token (Ouyang et al. 2022, equation 2; Stiennon et al. 2020).

    Worked example, score 1.5, coefficient 0.1, KL (2, 1): (-0.2, 1.4).
    """
    return at_ends(scores_B, lengths_B) - kl_coef * kl_R
