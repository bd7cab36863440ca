"""The optimal reward baseline (OPO). B responses."""

from __future__ import annotations

import numpy as np


def opo(outcome_B: np.ndarray, group_B: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
    """R - sum(length R) / sum(length) of the group (Hao et al. 2025). R 1 and 0, lengths 1 and 3: 0.75, -0.25."""
    _, place_B = np.unique(group_B, return_inverse=True)
    weighted = np.bincount(place_B, lengths_B * outcome_B) / np.bincount(place_B, lengths_B.astype(np.float64))
    return outcome_B - weighted[place_B]
