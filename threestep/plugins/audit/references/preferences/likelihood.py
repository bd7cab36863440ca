"""The likelihood of chosen responses, a term of other losses. P pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from threestep.plugins.audit.references.preferences.responses import ResponseSums, Term


def sft(responses: ResponseSums, term: Term) -> np.ndarray:
    """-log pi(y_w | x) / |y_w| of each prompt's best response (Pang et al. 2024, RPO, equation 1, second term), shared
    out over its pairs. Log-probabilities -0.5, -1, -1.5: 1."""
    best_P = ~np.isin(responses.chosen_P, responses.rejected_P)
    return np.where(best_P, responses.shared(-responses.means_S), 0.0)
