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

    def after(
        self,
        weight: np.ndarray,
        gradient: np.ndarray,
        first: np.ndarray,
        second: np.ndarray,
        *,
        inside_root: bool = False,
    ) -> np.ndarray:
        """The weight after this update: lines 6 to 12. inside_root: epsilon is added to v, as by mistake.

        Worked example, weight 1, gradient 1, no history, rate 0.1, no decay: 1 - 0.1 = 0.9.
        """
        t = self.updates_before + 1.0
        m = self.beta1 * first + (1.0 - self.beta1) * gradient
        v = self.beta2 * second + (1.0 - self.beta2) * gradient**2
        m_hat, v_hat = m / (1.0 - self.beta1**t), v / (1.0 - self.beta2**t)
        root = np.sqrt(v_hat + self.epsilon) if inside_root else np.sqrt(v_hat) + self.epsilon
        return weight - self.rate * (m_hat / root + self.decay * weight)


@dataclass(frozen=True)
class RateShape:
    """The constants of a schedule. warmup, total: optimizer steps. init, least: shares of the peak."""

    warmup: float
    total: float
    init: float = 0.0
    least: float = 0.0
    cycles: float = 0.5
    stable: float = 0.9


def share_of_peak(name: str, step: float, shape: RateShape) -> float:
    """The learning rate of the step after `step` others, as a share of its peak: up in a line, then by the schedule.

    cosine: Loshchilov and Hutter 2017, equation 5; wsd: Hu et al. 2024, section 4.2; inverse_sqrt: Vaswani et al. 2017,
    equation 3, without its scale; linear, constant, cosine_with_restarts and polynomial (of power 1, down to 0): as
    transformers has them. Linear, 1 of 2 steps, no warm-up: 1/2.
    """
    if step < shape.warmup:
        return shape.init + (1.0 - shape.init) * step / max(1.0, shape.warmup)
    after, steps = step - shape.warmup, shape.total - shape.warmup
    done = after / max(1.0, steps)
    if name == "wsd":
        stable = math.floor(max(0.0, steps) * shape.stable)
        falling = _half_cosine((after - stable) / max(1.0, steps - stable), shape.cycles) if after < steps else 0.0
        share = 1.0 if after < stable else falling
    elif name == "inverse_sqrt":
        share = math.sqrt((shape.warmup or 10_000.0) / (step + (0.0 if shape.warmup else 10_000.0)))
    else:
        share = {
            "constant": 1.0,
            "linear": max(0.0, 1.0 - done),
            "polynomial": max(0.0, 1.0 - done),
            "cosine": max(0.0, _half_cosine(done, shape.cycles)),
            "cosine_with_restarts": _half_cosine(done % 1.0, 0.5) if done < 1.0 else 0.0,
        }[name]
    return shape.least + (1.0 - shape.least) * share


def _half_cosine(done: float, cycles: float) -> float:
    return 0.5 * (1.0 + math.cos(2.0 * math.pi * cycles * done))
