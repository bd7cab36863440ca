"""KL-Cov and Clip-Cov. T tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from threestep.plugins.audit.references.kl import pull
from threestep.plugins.audit.references.policies.clipped import ppo

if TYPE_CHECKING:
    from threestep.plugins.audit.references.policies.tokens import Bounds, Tokens


def covariances(advantage_T: np.ndarray, logprobs_T: np.ndarray, counted_T: np.ndarray) -> np.ndarray:
    """(A - mean A) (log p - mean log p), means over the tokens of the step that count (Cui et al. 2025, section 4.1).
    A 1 and -1, log p -1 and -3: 1 and 1."""
    if not counted_T.any():
        return np.zeros(len(advantage_T))
    return (advantage_T - advantage_T[counted_T].mean()) * (logprobs_T - logprobs_T[counted_T].mean())


def kl_cov(tokens: Tokens, bounds: Bounds) -> np.ndarray:
    """-r A, and on selected tokens + coefficient |log p - log p_old| (the same paper, verl's estimate of the KL).

    Worked example, r = 1, A = 1, selected: -1.
    """
    assert tokens.selected_T is not None
    loss_T = -tokens.advantage_T * np.exp(tokens.log_ratio_T)
    penalty_T = bounds.penalty * pull("abs", tokens.log_ratio_T, tokens.held_log_ratio_T)
    return loss_T + np.where(tokens.selected_T, penalty_T, 0.0)


def clip_cov(tokens: Tokens, bounds: Bounds) -> np.ndarray:
    """PPO's loss, 0 on selected tokens."""
    assert tokens.selected_T is not None
    return np.where(tokens.selected_T, 0.0, ppo(tokens, bounds))
