"""The optimal token baseline. B responses, R their tokens one after the other."""

from __future__ import annotations

import numpy as np

from threestep.plugins.audit.references.estimators.returns import to_go


def optimal(
    rewards_R: np.ndarray, energy_R: np.ndarray, lengths_B: np.ndarray, group_B: np.ndarray, *, zero_tail: bool = True
) -> np.ndarray:
    """G_t - sum(G_t W_t) / sum(W_t) over the responses of the group that have a token t, W_t = w_1 + ... + w_t (Li et
    al. 2026, arXiv:2602.07078). energy_R: w, 1 - 2 p + sum(p^2), times the square of a mismatch's weight.

    Beyond the end of all others the baseline is 0, or, without `zero_tail`, the return itself.
    Worked example, two responses of one token, returns 1 and 0, w 1 and 3: baseline 1/4, so 3/4 and -1/4.
    """
    returns_R, ends_B = to_go(rewards_R, lengths_B, 1.0), np.cumsum(lengths_B)
    found_R = np.zeros(len(rewards_R))
    for group in np.unique(group_B):
        own = np.flatnonzero(group_B == group)
        begins, lengths = ends_B[own] - lengths_B[own], lengths_B[own]
        sums = [np.cumsum(energy_R[begin : begin + length]) for begin, length in zip(begins, lengths, strict=True)]
        for t in range(int(lengths.max())):
            alive = [place for place in range(len(own)) if lengths[place] > t]
            there = [int(begins[place]) + t for place in alive]
            if len(alive) == 1:
                found_R[there] = returns_R[there] if zero_tail else 0.0
                continue
            weights = np.array([sums[place][t] for place in alive])
            weights = weights if weights.sum() > 0 else np.ones(len(alive))
            found_R[there] = returns_R[there] - (returns_R[there] * weights).sum() / weights.sum()
    return found_R
