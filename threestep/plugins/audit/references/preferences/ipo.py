"""The squared loss of identity preference optimisation. P pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from threestep.plugins.audit.references.preferences.responses import ResponseSums, Term


def ipo(responses: ResponseSums, term: Term) -> np.ndarray:
    """(h - 1 / (2 beta))^2 (Azar et al. 2023, equation 17), h of means over tokens, as its authors advised TRL.

    Worked example, h = 1/3, beta = 0.1: (1/3 - 5)^2 = 21.7778.
    """
    return (responses.gap(responses.mean_ratios_S) - 1.0 / (2.0 * term.beta)) ** 2
