"""Soft adaptive policy optimisation. T tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from threestep.plugins.audit.references.policies.tokens import Bounds, Tokens


def sapo(tokens: Tokens, bounds: Bounds) -> np.ndarray:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A (Gao et al. 2025). r = 1, tau = 1, A = 1: -2."""
    tau_T = np.where(tokens.advantage_T > 0, *bounds.taus)
    gate_T = 4.0 / tau_T / (1.0 + np.exp(-tau_T * (np.exp(tokens.log_ratio_T) - 1.0)))
    return -tokens.advantage_T * gate_T
