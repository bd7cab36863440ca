"""Clipping by the norm, the learning rate's schedule, and AdamW."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


def norm(parts: list[np.ndarray]) -> float:
    """The Euclidean norm of all numbers."""
    return math.sqrt(sum(float((part.astype(np.float64) ** 2).sum()) for part in parts))


def clip_factor(total: float, most: float) -> float:
    """min(1, most / |g|) (Pascanu et al. 2013, algorithm 1). |g| = 4, most = 1: 1/4."""
    return 1.0 if not most or total <= most else most / total


@dataclass(frozen=True)
class AdamW:
    """The constants of Loshchilov and Hutter 2019, algorithm 2."""

    rate: float
    beta1: float
    beta2: float
    epsilon: float
    decay: float
    updates_before: float

    def after(self, weight: np.ndarray, gradient: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """The weight after this update: lines 6 to 12.

        Worked example, weight 1, gradient 1, no history, rate 0.1, no decay: 1 - 0.1 = 0.9.
        """
        t = self.updates_before + 1.0
        m = self.beta1 * first + (1.0 - self.beta1) * gradient
        v = self.beta2 * second + (1.0 - self.beta2) * gradient**2
        m_hat, v_hat = m / (1.0 - self.beta1**t), v / (1.0 - self.beta2**t)
        return weight - self.rate * (m_hat / (np.sqrt(v_hat) + self.epsilon) + self.decay * weight)


def share_of_peak(shape: str, step: float, warmup: float, total: float) -> float:
    """The learning rate of the step after `step` others, as a share of its peak: up in a line, then constant, down in a
    line, or down a half cosine (Loshchilov and Hutter 2017, equation 5). Linear, 1 of 2 steps, no warm-up: 1/2."""
    if step < warmup:
        return step / max(1.0, warmup)
    done = min(1.0, (step - warmup) / max(1.0, total - warmup))
    return {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[shape]
