"""Weights that correct a mismatch of rollout and training. R tokens of all responses one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rule:
    """kind: truncate or mask. level: whose ratio: token, sequence, geometric. least: None is no lower bound of
    truncate, and 1 / most of mask."""

    kind: str
    level: str = "token"
    most: float = 2.0
    least: float | None = None


def weights(log_ratio_R: np.ndarray, response_R: np.ndarray, rule: Rule) -> np.ndarray:
    """min(rho, C) (truncated importance sampling: Yao et al. 2025), or rho between its bounds and 0 outside (IcePop:
    Ling team 2025); rho of the token, the product over the response, or its geometric mean, exponents held at 20.

    Worked example, ratios 2 and 1/4 of one response, C = 1.5: 1.5 and 0.25; of the sequence, 0.5 and 0.5.
    """
    counts_B = np.bincount(response_R)
    if rule.level != "token":
        sums_B = np.bincount(response_R, log_ratio_R)
        of_response_B = sums_B / np.maximum(counts_B, 1) if rule.level == "geometric" else sums_B
        log_ratio_R = of_response_B[response_R]
    rho_R = np.exp(np.clip(log_ratio_R, -20.0, 20.0))
    if rule.kind == "truncate":
        return np.clip(rho_R, rule.least, rule.most)
    least = 1.0 / rule.most if rule.least is None else rule.least
    return np.where((rho_R >= least) & (rho_R <= rule.most), rho_R, 0.0)


def normalised(weights_R: np.ndarray, response_R: np.ndarray, counts_R: np.ndarray, level: str) -> np.ndarray:
    """Divided by their mean over tokens that count, or over responses. Weights 1 and 3: 0.5 and 1.5."""
    share_R = counts_R.astype(np.float64)
    if level != "token":
        share_R = share_R / np.maximum(np.bincount(response_R, share_R)[response_R], 1.0)
    total = float((weights_R * share_R).sum())
    return weights_R * float(share_R.sum()) / total if total > 0 else weights_R
