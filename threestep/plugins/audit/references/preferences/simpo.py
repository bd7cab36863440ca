"""SimPO. P pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from threestep.plugins.audit.references.preferences.responses import ResponseSums, Term, smoothed

if TYPE_CHECKING:
    import numpy as np


def simpo(responses: ResponseSums, term: Term) -> np.ndarray:
    """-log sigmoid(beta (q_w - q_l) - gamma), q the mean log-probability of a token (Meng et al. 2024, equation 6).

    Worked example, q_w = -1, q_l = -7/6, beta = 2, gamma = 0.5: -log sigmoid(-1/6) = 0.779949.
    """
    return smoothed(term.beta * responses.gap(responses.means_S) - term.gamma, term.smoothing)
