"""Losses of pairs of responses. P pairs."""

from __future__ import annotations

import numpy as np


def log_sigmoid(x: np.ndarray) -> np.ndarray:
    """log 1 / (1 + exp(-x)), without overflow."""
    return -np.logaddexp(0.0, -x)


def sigmoid_loss(margin_P: np.ndarray, beta: float, smoothing: float = 0.0) -> np.ndarray:
    """-log sigmoid(beta h), h the difference of the log-ratios log pi / pi_ref (Rafailov et al. 2023, equation 7);
    smoothed: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h) (Mitchell 2023, equation 3).

    Worked example, h = 0: log 2, whatever beta is.
    """
    return -(1.0 - smoothing) * log_sigmoid(beta * margin_P) - smoothing * log_sigmoid(-beta * margin_P)


def ipo_loss(margin_P: np.ndarray, beta: float, smoothing: float = 0.0) -> np.ndarray:
    """(h - 1 / (2 beta))^2 (Azar et al. 2023, equation 17), h of means over tokens. h = 0, beta = 0.5: 1."""
    return (margin_P - 1.0 / (2.0 * beta)) ** 2


def hinge_loss(margin_P: np.ndarray, beta: float, smoothing: float = 0.0) -> np.ndarray:
    """max(0, 1 - beta h) (Zhao et al. 2023, SLiC, equation 1, on log-ratios). h = 4, beta = 0.1: 0.6."""
    return np.maximum(0.0, 1.0 - beta * margin_P)


LOSSES = {"sigmoid": sigmoid_loss, "ipo": ipo_loss, "hinge": hinge_loss}


def ranking_loss(
    chosen_P: np.ndarray, rejected_P: np.ndarray, margin_P: np.ndarray, *, smoothing: float = 0.0, centring: float = 0.0
) -> np.ndarray:
    """-log sigmoid(r_w - r_l - m): Ouyang et al. 2022, equation 1; m: Touvron et al. 2023, equation 2.
    centring: times (r_w + r_l)^2 (Eisenstein et al. 2023, section 2).

    Worked example, scores 1 and 1, no margin: log 2.
    """
    gap_P = chosen_P - rejected_P - margin_P
    loss_P = -(1.0 - smoothing) * log_sigmoid(gap_P) - smoothing * log_sigmoid(-gap_P)
    return loss_P + centring * (chosen_P + rejected_P) ** 2
