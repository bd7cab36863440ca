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


def pull(name: str, difference_T: np.ndarray, held_T: np.ndarray) -> np.ndarray:
    """An estimator's value, with the gradient that a loss has through `difference_T`, log p - log p_ref. held_T: the
    same numbers without a gradient.

    A `+` pulls as k2 (verl); abs fades below 1e-3 nats, where a difference may be rounding: |d|^3 / (3e-6) there.
    """
    plain = name.removesuffix("+")
    if plain == "abs" and not name.endswith("+"):
        small_T = np.abs(held_T) < 1e-3
        faded = [np.where(small_T, np.abs(d) ** 3 / 3e-6, np.abs(d)) for d in (difference_T, held_T)]
        return np.abs(held_T) + faded[0] - faded[1]
    if name.endswith("+"):
        return ESTIMATORS[plain](held_T, np.zeros_like(held_T)) + 0.5 * difference_T**2 - 0.5 * held_T**2
    return ESTIMATORS[plain](difference_T, np.zeros_like(held_T))
