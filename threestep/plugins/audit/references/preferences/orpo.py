"""Odds ratio preference optimisation. P pairs."""

from __future__ import annotations

import numpy as np

from threestep.plugins.audit.references.preferences.likelihood import sft
from threestep.plugins.audit.references.preferences.responses import ResponseSums, Term, log_sigmoid


def orpo(responses: ResponseSums, term: Term) -> np.ndarray:
    """NLL(y_w) - beta log sigmoid(log odds(y_w) - log odds(y_l)), odds = P / (1 - P), P the geometric mean of its
    tokens' probabilities (Hong et al. 2024, equations 3, 4, 6 and 7).

    Worked example, means -1 and -7/6, beta = 0.1: the odds' term is 0.057496, and 1.057496 with the likelihood.
    """
    mean_S = np.minimum(responses.means_S, -1e-15)
    odds_S = mean_S - np.log(-np.expm1(mean_S))
    return sft(responses, term) - term.beta * log_sigmoid(responses.gap(odds_S))
