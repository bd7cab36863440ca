"""Contrastive preference optimisation. P pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from threestep.plugins.audit.references.preferences.likelihood import sft
from threestep.plugins.audit.references.preferences.responses import ResponseSums, Term, smoothed

if TYPE_CHECKING:
    import numpy as np


def cpo(responses: ResponseSums, term: Term) -> np.ndarray:
    """-log sigmoid(beta (log pi(y_w) - log pi(y_l))) + alpha NLL(y_w) (Xu et al. 2024; the first term: equation 3), the
    likelihood a mean over tokens.

    Worked example, sums -3 and -3.5, beta = 0.1, alpha = 0: -log sigmoid(0.05) = 0.668460.
    """
    return smoothed(term.beta * responses.gap(responses.weighted_S), term.smoothing) + term.alpha * sft(responses, term)
