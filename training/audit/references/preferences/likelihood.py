"""The likelihood of chosen responses, a term of other losses. P pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from training.audit.references.preferences.responses import ResponseSums, Term


def sft(responses: ResponseSums, term: Term) -> np.ndarray:
    """-log pi(y_w | x) / |y_w| of each prompt's best response (Pang et al. 2024, RPO, equation 1, second term), shared
    out over its pairs. Log-probabilities -0.5, -1, -1.5: 1."""
    nll_P = -responses.means_S[responses.chosen_P]
    return nll_P if responses.likelihood_P is None else nll_P * responses.likelihood_P
