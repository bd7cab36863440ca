"""Clipped importance sampling policy optimisation. T tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from threestep.plugins.audit.references.policies.tokens import Bounds, Tokens


def cispo(tokens: Tokens, bounds: Bounds) -> np.ndarray:
    """-sg(clip(r, 1 - low, 1 + high)) A log p (MiniMax 2025, equations 4 and 5).

    Worked example, r = 2, high = 0.5, A = 1, log p = -1: 1.5.
    """
    held_T = np.clip(np.exp(tokens.held_log_ratio_T), 1.0 - bounds.low, 1.0 + bounds.high)
    return -held_T * tokens.advantage_T * tokens.new_T
