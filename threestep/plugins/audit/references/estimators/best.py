"""Advantages for the best of k, and GPG's. B responses."""

from __future__ import annotations

import numpy as np

from threestep.plugins.audit.references.estimators.groups import group_mean


def passk(outcome_B: np.ndarray, group_B: np.ndarray) -> np.ndarray:
    """The best's lead over the second of its group, 0 for all others (Tang et al. 2025). 3, 1 and 2: 1, 0, 0."""
    found_B = np.zeros(len(outcome_B))
    for group in np.unique(group_B):
        own = np.flatnonzero(group_B == group)
        if len(own) > 1:
            best, second = own[np.argsort(-outcome_B[own], kind="stable")[:2]]
            found_B[best] = outcome_B[best] - outcome_B[second]
    return found_B


def gpg(outcome_B: np.ndarray, group_B: np.ndarray, apart_B: np.ndarray) -> np.ndarray:
    """alpha (R - mean of the group), alpha = responses / responses in groups that differ (Chu et al. 2025). apart_B:
    bool, of a group whose outcomes differ. Groups (1, 0) and (2, 2): alpha 2, so 1, -1, 0, 0."""
    alpha = len(outcome_B) / max(float(apart_B.sum()), 1.0)
    return np.where(apart_B, alpha * (outcome_B - group_mean(outcome_B, group_B)), 0.0)
