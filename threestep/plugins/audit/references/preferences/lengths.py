"""Weights of tokens by length (LD-DPO). T tokens, S sequences."""

from __future__ import annotations

import numpy as np


def tail_weights(
    mask_T: np.ndarray, sequence_T: np.ndarray, prompt_S: np.ndarray, tokens_S: np.ndarray, *, alpha: float
) -> np.ndarray:
    """Return [T], 1 up to the length of the prompt's shortest response and alpha beyond (Liu et al. 2024, LD-DPO).
    ResponseSums of 1 and 3 tokens, alpha 0.4: 1; 1, 0.4, 0.4."""
    _, place_S = np.unique(prompt_S, return_inverse=True)
    shortest = np.full(place_S.max(initial=-1) + 1, np.inf)
    np.minimum.at(shortest, place_S, tokens_S)
    counted_T = np.cumsum(mask_T)
    before_S = np.concatenate([[0], np.cumsum(tokens_S)[:-1]])
    own_T = counted_T - before_S[sequence_T]
    return np.where(own_T <= shortest[place_S][sequence_T], 1.0, alpha)
