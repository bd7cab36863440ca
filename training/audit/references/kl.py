"""Estimators of the KL to the reference from log-probabilities of drawn tokens (Schulman 2020, "Approximating KL
divergence"). T tokens."""

from __future__ import annotations

import numpy as np


def k1(logprobs_T: np.ndarray, ref_T: np.ndarray) -> np.ndarray:
    """log p - log p_ref."""
    return logprobs_T - ref_T


def k2(logprobs_T: np.ndarray, ref_T: np.ndarray) -> np.ndarray:
    """1/2 (log p - log p_ref)^2."""
    return 0.5 * (logprobs_T - ref_T) ** 2


def k3(logprobs_T: np.ndarray, ref_T: np.ndarray) -> np.ndarray:
    """r - 1 - log r, r = p_ref / p (GRPO: Shao et al. 2024, equation 4). p = 1/2, p_ref = 1: 1 - log 2."""
    return np.expm1(ref_T - logprobs_T) - (ref_T - logprobs_T)


def absolute(logprobs_T: np.ndarray, ref_T: np.ndarray) -> np.ndarray:
    """|log p - log p_ref|."""
    return np.abs(logprobs_T - ref_T)


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}
