"""Anchored preference optimisation. P pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from threestep.plugins.audit.references.preferences.responses import ResponseSums, Term, sigmoid

if TYPE_CHECKING:
    import numpy as np


def zero(responses: ResponseSums, term: Term) -> np.ndarray:
    """1 - sigmoid(beta r_w) + sigmoid(beta r_l) (D'Oosterlinck et al. 2024, equation 7).

    Worked example, r_w = 0.4, r_l = -0.6, beta = 0.1: 1 - 0.509999 + 0.485004 = 0.975006.
    """
    reward_S = term.beta * responses.ratios_S
    return 1.0 - sigmoid(reward_S[responses.chosen_P]) + sigmoid(reward_S[responses.rejected_P])


def down(responses: ResponseSums, term: Term) -> np.ndarray:
    """sigmoid(beta r_w) + 1 - sigmoid(beta (r_w - r_l)) (the same, equation 8). The same numbers: 0.985019."""
    reward_S = term.beta * responses.ratios_S
    return sigmoid(reward_S[responses.chosen_P]) + 1.0 - sigmoid(responses.gap(reward_S))
