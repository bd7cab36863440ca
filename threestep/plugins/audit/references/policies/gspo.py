"""Group sequence policy optimisation. T tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from threestep.plugins.audit.references.policies.clipped import clipped

if TYPE_CHECKING:
    from threestep.plugins.audit.references.policies.tokens import Bounds, Tokens


def gspo(tokens: Tokens, bounds: Bounds) -> np.ndarray:
    """PPO's, with the ratio s = exp(mean of log p - log p_old) of a whole response (Zheng et al. 2025, equations 5 to
    7), whose gradient goes through the token (equation 14). The mean is held below 10, as verl's.

    Worked example, log-ratios 0.2 and 0, A = 1, bounds 1: -exp(0.1) = -1.1052 on both tokens.
    """
    mean_T = np.minimum(tokens.means(tokens.held_log_ratio_T), 10.0)
    ratio_T = np.exp(mean_T + tokens.new_T - tokens.held_T)
    return clipped(ratio_T, tokens.advantage_T, bounds.low, bounds.high)
