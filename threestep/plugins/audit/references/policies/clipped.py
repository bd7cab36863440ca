"""PPO's loss, and the critic's. T tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from threestep.plugins.audit.references.policies.tokens import Bounds, Tokens


def surrogates(ratio_T: np.ndarray, advantage_T: np.ndarray, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """-r A and -clip(r, 1 - low, 1 + high) A."""
    return -ratio_T * advantage_T, -np.clip(ratio_T, 1.0 - low, 1.0 + high) * advantage_T


def clipped(
    ratio_T: np.ndarray, advantage_T: np.ndarray, low: float, high: float, *, dual: float | None = None
) -> np.ndarray:
    """-min(r A, clip(r) A) (Schulman et al. 2017, equation 7; two bounds: Yu et al. 2025, equation 10); at most -c A
    where A < 0 (Ye et al. 2020, equation 4).

    Worked example, bounds 0.2: r = 2, A = 1 gives -1.2; r = 2, A = -1 gives 2.
    """
    loss_T = np.maximum(*surrogates(ratio_T, advantage_T, low, high))
    if dual is None:
        return loss_T
    return np.where(advantage_T < 0, np.minimum(loss_T, -dual * advantage_T), loss_T)


def ppo(tokens: Tokens, bounds: Bounds) -> np.ndarray:
    """The same, of a step's tokens."""
    return clipped(np.exp(tokens.log_ratio_T), tokens.advantage_T, bounds.low, bounds.high, dual=bounds.dual)


def value_loss(value_T: np.ndarray, old_T: np.ndarray, return_T: np.ndarray, clip: float) -> np.ndarray:
    """1/2 max((v - R)^2, (clip(v, old - c, old + c) - R)^2) (openai/baselines' ppo2; Huang et al. 2022, detail 9).

    Worked example, v = 2, old = 0, R = 1, c = 0.5: max(1, 0.25) / 2 = 0.5.
    """
    held_T = np.clip(value_T, old_T - clip, old_T + clip)
    return 0.5 * np.maximum((value_T - return_T) ** 2, (held_T - return_T) ** 2)
