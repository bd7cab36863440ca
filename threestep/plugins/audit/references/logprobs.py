"""Log-probabilities from logits. T tokens, V vocabulary."""

from __future__ import annotations

import numpy as np


def logprobs(logits_TV: np.ndarray, token_ids_T: np.ndarray, temperature: float) -> np.ndarray:
    """Return [T], log softmax(logits / temperature) at each token (Ackley et al. 1985, equation 5, with T).

    Worked example, logits (0, log 3), token 1: at T = 1, log 3/4; at T = 1/2, log 9/10.
    """
    scaled_TV = logits_TV.astype(np.float64) / temperature
    largest_T1 = scaled_TV.max(axis=1, keepdims=True)
    normalizer_T = np.log(np.exp(scaled_TV - largest_T1).sum(axis=1)) + largest_T1[:, 0]
    return scaled_TV[np.arange(len(token_ids_T)), token_ids_T] - normalizer_T


def rounded_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the nearest numbers with 8 bits of mantissa, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)
