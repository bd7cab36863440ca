"""Losses of responses that are marked good or bad one by one. S sequences."""

from __future__ import annotations

import numpy as np

from threestep.plugins.audit.references.preferences.responses import ResponseSums, Term, log_sigmoid, sigmoid


def kto(responses: ResponseSums, term: Term) -> np.ndarray:
    """w (1 - sigmoid(beta (r - z))) of a good response, w (1 - sigmoid(beta (z - r))) of a bad one (Ethayarajh et al.
    2024, equations 7 and 8, without their constant).

    Worked example, beta = 0.1, z = 0: good with r = 0.4, 0.490001; bad with r = -0.6, 0.485005.
    """
    sign_S = _signs(responses)
    weight_S = np.where(sign_S > 0, *term.weights)
    return weight_S * (1.0 - sigmoid(sign_S * term.beta * (responses.ratios_S - term.point)))


def bco(responses: ResponseSums, term: Term) -> np.ndarray:
    """-log sigmoid(s beta (r - d)), s = 1 for good and -1 for bad (Jung et al. 2024, without UDM's weights).

    Worked example, beta = 0.1, d = 0: good with r = 0.4, 0.673347; bad with r = -0.6, 0.663597.
    """
    return -log_sigmoid(_signs(responses) * term.beta * (responses.ratios_S - term.point))


def kto_point(mismatched_S: np.ndarray) -> float:
    """max(0, the mean log-ratio of prompts with other rows' responses) (Ethayarajh et al. 2024). -1 and 3: 1."""
    return max(0.0, float(mismatched_S.mean())) if len(mismatched_S) else 0.0


def bco_point(ratios_S: np.ndarray, good_S: np.ndarray) -> float:
    """Half-way between the means of good and of bad responses; the one mean where there is one kind. 2 and -1: 0.5."""
    means = [float(ratios_S[side_S].mean()) for side_S in (good_S, ~good_S) if side_S.any()]
    return sum(means) / len(means)


def _signs(responses: ResponseSums) -> np.ndarray:
    assert responses.good_S is not None
    return np.where(responses.good_S, 1.0, -1.0)
