"""Geometric-mean policy optimisation. T tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from threestep.plugins.audit.references.policies.tokens import Bounds, Tokens


def geo_mean(tokens: Tokens, bounds: Bounds) -> np.ndarray:
    """-(mean of A) exp(mean of d), d = log p - log p_old, at most `high` where A > 0, at least -`low` elsewhere (Zhao
    et al. 2025, GMPO).

    Worked example, d 0.6 and 0, A = 1, high = 0.4: -exp(0.2) = -1.2214 on both tokens.
    """
    free_T = tokens.log_ratio_T
    held_T = np.where(tokens.advantage_T > 0, np.minimum(free_T, bounds.high), np.maximum(free_T, -bounds.low))
    return -tokens.means(tokens.advantage_T) * np.exp(tokens.means(held_T))
