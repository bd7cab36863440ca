"""DPO's loss, on sums and on means, and its robust form. P pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from threestep.plugins.audit.references.preferences.responses import ResponseSums, Term, log_sigmoid, smoothed

if TYPE_CHECKING:
    import numpy as np


def dpo(responses: ResponseSums, term: Term) -> np.ndarray:
    """-log sigmoid(beta h), h the difference of log pi / pi_ref (Rafailov et al. 2023, equation 7); smoothed: Mitchell
    2023, equation 3. h = 0: log 2, whatever beta is."""
    return smoothed(term.beta * responses.gap(responses.ratios_S), term.smoothing)


def normalised(responses: ResponseSums, term: Term) -> np.ndarray:
    """The same, h of means over tokens (Lambert et al. 2024, Tulu 3). Means 0.4 / 2 and -0.6 / 3, beta 1:
    -log sigmoid(0.4) = 0.5130."""
    return smoothed(term.beta * responses.gap(responses.mean_ratios_S), term.smoothing)


def robust(responses: ResponseSums, term: Term) -> np.ndarray:
    """(-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e) (Chowdhury et al. 2024).

    Worked example, h = 1, beta = 0.1, e = 0.1: (0.9 x 0.644397 - 0.1 x 0.744397) / 0.8 = 0.631897.
    """
    reward_P = term.beta * responses.gap(responses.ratios_S)
    wrong = term.smoothing
    return (-(1.0 - wrong) * log_sigmoid(reward_P) + wrong * log_sigmoid(-reward_P)) / (1.0 - 2.0 * wrong)
